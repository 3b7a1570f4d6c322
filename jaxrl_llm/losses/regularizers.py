"""Auxiliary per-token losses: likelihood, KL, entropy."""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import distributions
from jaxrl_llm.arrays import of_equal_shape


def nll(logprobs: chex.Array) -> jax.Array:
  """Negative log-likelihood of the sampled tokens, L = -log π(a).

  Summed with 'token-mean' weights over the tokens of the *correct* responses
  of a mini-batch, it is VAPO's positive-example language-model loss.

  Args:
    logprobs: [...], log-probabilities under the current policy.

  Returns:
    float32 [...], not reduced.

  Reference: Yue et al. 2025 (VAPO), arXiv:2504.05118, equation 9.

  Example:
    >>> print(nll(jnp.array([0.0, -0.5])))
    [-0.   0.5]
  """
  return -jnp.asarray(logprobs, jnp.float32)


@of_equal_shape("logprobs", "ref_logprobs")
def kl_k1(logprobs: chex.Array, ref_logprobs: chex.Array) -> jax.Array:
  """Schulman's k1 estimate of KL(π ‖ π_ref): d = log π - log π_ref.

  Unbiased as a value, but useless as a loss, E[∇k1] = 0; subtracted from the
  reward, it gives the gradient of KL(π ‖ π_ref).

  Args:
    logprobs: [...], of tokens sampled from π.
    ref_logprobs: [...], of the same tokens under the reference.

  Returns:
    float32 [...], may be negative.

  Reference: Schulman 2020, "Approximating KL divergence".

  Example:
    >>> print(kl_k1(jnp.array([-1.0, -1.0]), jnp.array([-1.5, -0.5])))
    [ 0.5 -0.5]
  """
  return jnp.asarray(logprobs, jnp.float32) - jnp.asarray(
    ref_logprobs, jnp.float32
  )


def kl_k2(logprobs: chex.Array, ref_logprobs: chex.Array) -> jax.Array:
  """Schulman's k2 estimate of KL(π ‖ π_ref): d²/2.

  Biased as a value, but correct as a loss: E[∇k2] = ∇KL(π ‖ π_ref).

  Args:
    logprobs: [...], of tokens sampled from π.
    ref_logprobs: [...], of the same tokens under the reference.

  Returns:
    float32 [...], at least 0.

  Reference: Schulman 2020, "Approximating KL divergence".

  Example:
    >>> print(kl_k2(jnp.array([-1.0, -1.0]), jnp.array([-1.5, -0.5])))
    [0.125 0.125]
  """
  return 0.5 * jnp.square(kl_k1(logprobs, ref_logprobs))


def kl_k3(logprobs: chex.Array, ref_logprobs: chex.Array) -> jax.Array:
  """Schulman's k3 estimate of KL(π ‖ π_ref): exp(-d) - 1 + d.

  Unbiased and never negative as a value. As a loss, which is how GRPO uses
  it, it has the gradient of the *other* direction: E[∇k3] = ∇KL(π_ref ‖ π).

  Args:
    logprobs: [...], of tokens sampled from π.
    ref_logprobs: [...], of the same tokens under the reference.

  Returns:
    float32 [...], at least 0. d is clamped to [-20, 20], beyond which the
    gradient is 0.

  Reference: Schulman 2020, "Approximating KL divergence"; Shao et al. 2024
    (GRPO), arXiv:2402.03300, equation 4.

  Example:
    >>> print(kl_k3(jnp.array([-1.0, -1.0]), jnp.array([-1.5, -0.5])))
    [0.10653067 0.14872128]
  """
  log_ratio = distributions.clamped_log_ratio(logprobs, ref_logprobs)
  # exp(-d) - 1 loses precision where the policies are close; expm1 does not.
  return jnp.expm1(-log_ratio) + log_ratio


def kl_k1_plus(logprobs: chex.Array, ref_logprobs: chex.Array) -> jax.Array:
  """KL(π ‖ π_ref) as a loss: the value of k1, the gradient of k2.

  Both are unbiased: E[value] = KL(π ‖ π_ref) and E[∇] = ∇KL(π ‖ π_ref).

  Args:
    logprobs: [...], of tokens sampled from π.
    ref_logprobs: [...], of the same tokens under the reference.

  Returns:
    float32 [...], may be negative.

  Reference: Schulman 2020, "Approximating KL divergence".

  Example:
    >>> value, slope = jax.value_and_grad(kl_k1_plus)(
    ...   jnp.float32(-1.0), jnp.float32(-1.5)
    ... )
    >>> print(value, slope)  # k1's value, k2's gradient.
    0.5 0.5
  """
  return with_gradient_of(
    kl_k1(logprobs, ref_logprobs), kl_k2(logprobs, ref_logprobs)
  )


def kl_k3_plus(logprobs: chex.Array, ref_logprobs: chex.Array) -> jax.Array:
  """KL(π ‖ π_ref) as a loss: the value of k3, the gradient of k2.

  Like `kl_k1_plus`, but never negative and with less variance.

  Args:
    logprobs: [...], of tokens sampled from π.
    ref_logprobs: [...], of the same tokens under the reference.

  Returns:
    float32 [...], at least 0.

  Reference: Schulman 2020, "Approximating KL divergence".

  Example:
    >>> value, slope = jax.value_and_grad(kl_k3_plus)(
    ...   jnp.float32(-1.0), jnp.float32(-1.5)
    ... )
    >>> print(f"{value:.3f} {slope}")  # k3's value, k2's gradient.
    0.107 0.5
  """
  return with_gradient_of(
    kl_k3(logprobs, ref_logprobs), kl_k2(logprobs, ref_logprobs)
  )


def entropy_bonus(entropy: chex.Array) -> jax.Array:
  """Entropy bonus as a loss, L = -H, for a positive coefficient.

  Args:
    entropy: [...], in nats, of the current policy at each token.

  Returns:
    float32 [...], not reduced.

  Reference: Mnih et al. 2016, arXiv:1602.01783, section 4.

  Example:
    >>> print(entropy_bonus(jnp.array([0.0, 0.7])))
    [-0.  -0.7]
  """
  return -jnp.asarray(entropy, jnp.float32)


def with_gradient_of(value: jax.Array, slope: jax.Array) -> jax.Array:
  """Returns `value` with the gradient of `slope` (straight-through)."""
  # In this order the difference is exactly 0, so the value is bitwise the same.
  return jax.lax.stop_gradient(value) + (slope - jax.lax.stop_gradient(slope))
