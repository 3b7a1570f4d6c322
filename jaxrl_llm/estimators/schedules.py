"""Settings that depend on the data, such as a lambda for each response."""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.errors import check_number


def length_adaptive_lambda(
  lengths: chex.Array, *, alpha: chex.Numeric
) -> jax.Array:
  """VAPO's lambda of the policy, λ(l) = max(0, 1 - 1/(α l)).

  It makes the weights of GAE sum to Σ λᵗ ≈ 1/(1 - λ) = α l, so that the
  horizon is the same share α of every response. The paper leaves λ ≤ 0 open,
  which its formula gives for l ≤ 1/α; it is clamped at 0 here. With α = 0.05
  lambda passes 0.95 only at 400 tokens: choose a larger α for short responses.

  Args:
    lengths: int or float [...], response tokens, the stop token included.
    alpha: horizon as a share of the response, positive.

  Returns:
    float32 [...], in [0, 1); 0 for an empty response.

  Raises:
    ValueError: if alpha is not positive.

  Reference: Yue et al. 2025 (VAPO), arXiv:2504.05118, equations 4 and 5.

  Example:
    >>> lengths = jnp.array([20, 400, 4000])
    >>> print(length_adaptive_lambda(lengths, alpha=0.05))
    [0.    0.95  0.995]
  """
  check_number("alpha", alpha, "(0, inf]")
  horizon = jnp.asarray(lengths, jnp.float32) * alpha
  # Below one token the formula is negative, and at none it divides by zero.
  return 1.0 - 1.0 / jnp.maximum(horizon, 1.0)
