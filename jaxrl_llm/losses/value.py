"""Regression of a critic on returns."""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.arrays import of_equal_shape
from jaxrl_llm.errors import check_number


class ClippedValueLoss(NamedTuple):
  """Per-token loss and where its clip is active, of one shape."""

  loss: jax.Array  # float32, to be minimised.
  clipped: jax.Array  # bool, the clipped error was the larger one.


@of_equal_shape("values", "returns", "old_values")
def clipped_value_loss(
  values: chex.Array,
  returns: chex.Array,
  *,
  old_values: chex.Array | None = None,
  clip_value: chex.Numeric | None = None,
) -> ClippedValueLoss:
  """Squared error of a critic, pessimistic about large moves if clipped.

    L = ½ (V - G)²                                          without a clip
    L = ½ max((V - G)², (clip(V, V_old ± clip_value) - G)²)     with one

  Args:
    values: [...], V, current predictions.
    returns: [...], G, targets. No gradient is stopped here.
    old_values: [...], V_old, predictions at the start of the update.
    clip_value: clip range around V_old, at least 0; a number or an array
      that broadcasts. Requires old_values, and vice versa.

  Returns:
    A `ClippedValueLoss`, not reduced.

  Raises:
    ValueError: if one of old_values and clip_value is missing, or clip_value
      is negative.

  Reference: Schulman et al. 2017 (PPO), arXiv:1707.06347; the clip comes from
    that paper's public implementation, not from its text.

  Example:
    >>> values, returns = jnp.array([0.5, 0.5]), jnp.array([1.0, 0.0])
    >>> print(clipped_value_loss(values, returns).loss)
    [0.125 0.125]
    >>> old = {"old_values": jnp.array([0.0, 0.0]), "clip_value": 0.25}
    >>> out = clipped_value_loss(values, returns, **old)
    >>> print(out.loss, out.clipped)
    [0.28125 0.125  ] [ True False]
  """
  if (old_values is None) != (clip_value is None):
    raise ValueError(
      "old_values and clip_value belong together; only"
      f" {'clip_value' if old_values is None else 'old_values'} was given"
    )
  values = jnp.asarray(values, jnp.float32)
  returns = jnp.asarray(returns, jnp.float32)
  squares = jnp.square(values - returns)
  if clip_value is None:
    return ClippedValueLoss(0.5 * squares, jnp.zeros(values.shape, bool))
  check_number("clip_value", clip_value, "[0, inf]")
  old_values = jnp.asarray(old_values, jnp.float32)
  room = jnp.broadcast_to(jnp.asarray(clip_value, jnp.float32), values.shape)
  bounded = jnp.clip(values, old_values - room, old_values + room)
  bounded_squares = jnp.square(bounded - returns)
  clipped = bounded_squares > squares
  return ClippedValueLoss(
    loss=0.5 * jnp.where(clipped, bounded_squares, squares), clipped=clipped
  )


def categorical_value_loss(
  value_logits: chex.Array,
  returns: chex.Array,
  *,
  low: float,
  high: float,
  sigma: float = 0.75,
) -> ClippedValueLoss:
  """Cross entropy of a critic's K bins to a Gaussian about the return.

    L = -Σ_k p_k log softmax(z)_k
    p_k ∝ Φ((e_{k+1} - G) / s) - Φ((e_k - G) / s)

  e_0 = low, ..., e_K = high are the edges of the bins, s is sigma bin widths.
  The gradient with respect to z is softmax(z) - p, however far G is, and noise
  of the returns moves probability instead of the whole regression.

  Args:
    value_logits: [..., K], z, logits of the bins.
    returns: [...], G, targets; those outside [low, high] count as its nearest
      end. No gradient is stopped here.
    low: lower edge of the first bin.
    high: upper edge of the last bin. Returns should be several bin widths
      inside, where the mean of p equals G.
    sigma: standard deviation of the Gaussian in bin widths.

  Returns:
    A `ClippedValueLoss` of shape [...], not reduced; nothing is clipped.

  Raises:
    ValueError: if low is not below high, or sigma is not positive.

  Reference: Farebrother et al. 2024 (HL-Gauss), arXiv:2403.03950.

  Example:
    >>> logits, returns = jnp.zeros((2, 3)), jnp.array([0.0, 1.5])
    >>> out = categorical_value_loss(logits, returns, low=-1.5, high=1.5)
    >>> print(out.loss)
    [1.0986123 1.0986123]
  """
  value_logits = jnp.asarray(value_logits, jnp.float32)
  returns = jnp.asarray(returns, jnp.float32)
  chex.assert_equal_shape([value_logits[..., 0], returns])
  check_number("high", high, f"({low}, inf)")
  check_number("sigma", sigma, "(0, inf)")
  edges = jnp.linspace(low, high, value_logits.shape[-1] + 1)
  edges = jnp.expand_dims(edges, tuple(range(returns.ndim)))
  deviation = sigma * (high - low) / value_logits.shape[-1]
  distance = edges - jnp.clip(returns, low, high)[..., None]
  below = jax.lax.erf(distance / (math.sqrt(2) * deviation))
  target = jnp.diff(below) / (below[..., -1:] - below[..., :1])
  loss = -jnp.sum(target * jax.nn.log_softmax(value_logits), axis=-1)
  return ClippedValueLoss(loss, jnp.zeros(loss.shape, bool))
