"""Advantages from another model's log-probs."""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.arrays import of_equal_shape


@of_equal_shape("old_logprobs", "teacher_logprobs", "mask")
def teacher_advantages(
  old_logprobs: chex.Array, teacher_logprobs: chex.Array, mask: chex.Array
) -> jax.Array:
  """Log-ratio of a teacher to the policy, A_t = log π_teacher - log π_old.

  Its expectation under the policy is -KL(π_old ‖ π_teacher) at the token (the
  k1 estimate), so the policy gradient minimises the reverse KL. An advantage
  depends on its own token only, not on later ones: the gradient is that of the
  mean per-token KL, with the sampled responses held fixed.

  Args:
    old_logprobs: [..., T], of tokens that the policy sampled, under the policy.
    teacher_logprobs: [..., T], of the same tokens under the teacher.
    mask: [..., T], True at tokens that may carry loss.

  Returns:
    float32 [..., T]; 0 in masked slots and where both models agree.

  Reference: Thinking Machines Lab 2025, "On-Policy Distillation"; Agarwal et
    al. 2023 (GKD), arXiv:2306.13649, with λ = 1 and the reverse KL.

  Example:
    >>> old, teacher = jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.25]]))
    >>> print(teacher_advantages(old, teacher, jnp.ones(2, bool)))
    [ 0.        -0.6931472]
  """
  difference = jnp.asarray(teacher_logprobs, jnp.float32) - jnp.asarray(
    old_logprobs, jnp.float32
  )
  return jnp.where(mask, difference, 0.0)
