"""Normalisation of advantages over the whole batch, as a step of its own."""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import masked
from jaxrl_llm.errors import check_number


def whiten(
  advantages: chex.Array,
  mask: chex.Array,
  *,
  center: bool = True,
  epsilon: float = 1e-8,
) -> jax.Array:
  """Advantages whitened over all tokens of the batch, (A - Ā) / √(var A + ε).

  Every token counts once, so that long responses weigh more, and the variance
  has Bessel's correction. No estimator does this by itself: call it after the
  value targets are formed, on the global batch.

  REINFORCE++ is this step after the reward to go, which is `lambda_returns`
  with values of 0 and γ = λ = 1; for its variant with a baseline, center the
  rewards of each group first with `group_relative(..., scale='none')`.

  Args:
    advantages: [..., T].
    mask: [..., T], True at the tokens that count.
    center: False keeps the mean and divides by the scale alone. Signs then
      stay as they are and zeros stay zero: right for `egae`, whose last token
      of a cut response must stay without gradient.
    epsilon: added to the variance, at least 0.

  Returns:
    float32 [..., T]; 0 in masked slots.

  Raises:
    ValueError: if epsilon is negative.

  Reference: Hu et al. 2025 (REINFORCE++), arXiv:2501.03262.

  Example:
    >>> advantages = jnp.array([[1.0, 2.0], [3.0, 0.0]])
    >>> mask = jnp.array([[True, True], [True, False]])
    >>> print(whiten(advantages, mask))
    [[-1.  0.]
     [ 1.  0.]]
  """
  chex.assert_equal_shape([advantages, mask])
  check_number("epsilon", epsilon, "[0, inf]")
  scale = jnp.sqrt(masked.masked_var(advantages, mask) + epsilon)
  advantages = masked.masked_fill(advantages, mask)
  if center:
    advantages = advantages - masked.masked_mean(advantages, mask)
  return masked.masked_fill(advantages / scale, mask)
