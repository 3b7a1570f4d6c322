"""Changes of the reward before any estimator sees it."""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import masked
from jaxrl_llm.errors import check_number


def soft_overlong_punishment(
  lengths: chex.Array,
  *,
  max_length: int,
  buffer: int,
  factor: float = 1.0,
) -> jax.Array:
  """DAPO's soft overlong punishment, to be added to the outcome reward.

    R(l) = 0                               l ≤ L_max - L_buffer
         = ((L_max - L_buffer) - l) / L_buffer   up to l = L_max
         = -1                              beyond

  times the factor. Dynamic sampling must look at correctness without it:
  groups that differ in length alone are not worth training on.

  Args:
    lengths: int [...], response tokens, the stop token included.
    max_length: L_max, the limit of generation, in tokens.
    buffer: L_buffer, tokens before the limit over which the punishment grows,
      in [1, max_length].
    factor: the full punishment, at least 0.

  Returns:
    float32 [...], in [-factor, 0].

  Raises:
    ValueError: if a setting is outside its range.

  Reference: Yu et al. 2025 (DAPO), arXiv:2503.14476, equation 13.

  Example:
    >>> lengths = jnp.array([85, 90, 100])
    >>> print(soft_overlong_punishment(lengths, max_length=100, buffer=20))
    [-0.25 -0.5  -1.  ]
  """
  check_number("buffer", buffer, f"[1, {max_length}]")
  check_number("factor", factor, "[0, inf]")
  above = jnp.asarray(lengths, jnp.float32) - (max_length - buffer)
  return -factor * jnp.clip(above / buffer, 0.0, 1.0)


def penalize_kl(
  token_rewards: chex.Array,
  logprobs: chex.Array,
  ref_logprobs: chex.Array,
  mask: chex.Array,
  *,
  coefficient: chex.Numeric,
) -> jax.Array:
  """KL to a reference policy as a cost per token, r_t - β (log π - log π_ref).

  The cost is the k1 estimate: in the reward it, and not k3, gives the gradient
  of KL(π ‖ π_ref).

  Args:
    token_rewards: [..., T].
    logprobs: [..., T], of the policy that the tokens are credited to, usually
      at the start of the update; data, not differentiated.
    ref_logprobs: [..., T], under the reference.
    mask: [..., T], True at response tokens.
    coefficient: β, at least 0.

  Returns:
    float32 [..., T]; 0 in masked slots.

  Raises:
    ValueError: if the coefficient is negative.

  Reference: Ziegler et al. 2019, arXiv:1909.08593, equation 2; Schulman 2020,
    "Approximating KL divergence".

  Example:
    >>> rewards, mask = jnp.array([0.0, 1.0]), jnp.array([True, True])
    >>> new, ref = jnp.array([-1.0, -0.5]), jnp.array([-1.5, -0.5])
    >>> print(penalize_kl(rewards, new, ref, mask, coefficient=0.1))
    [-0.05  1.  ]
  """
  chex.assert_equal_shape([token_rewards, logprobs, ref_logprobs, mask])
  check_number("coefficient", coefficient, "[0, inf]")
  k1 = masked.masked_fill(logprobs, mask) - masked.masked_fill(
    ref_logprobs, mask
  )
  return masked.masked_fill(token_rewards, mask) - coefficient * k1
