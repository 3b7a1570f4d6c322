"""Regression of a critic on returns."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.arrays import of_equal_shape
from jaxrl_llm.errors import check_number


class ClippedValueLoss(NamedTuple):
  """Per-token loss and its clip flags, of the same shape."""

  loss: jax.Array  # float32, to be minimised.
  clipped: jax.Array  # bool, True where the clipped error is larger.


@of_equal_shape("values", "returns", "old_values")
def clipped_value_loss(
  values: chex.Array,
  returns: chex.Array,
  *,
  old_values: chex.Array | None = None,
  clip_value: chex.Numeric | None = None,
) -> ClippedValueLoss:
  """Squared error of a critic, with an optional pessimistic clip.

    L = ½ (V - G)²                                          without a clip
    L = ½ max((V - G)², (clip(V, V_old ± clip_value) - G)²)    with a clip

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
    the paper's public implementation, not from its text.

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
      "old_values and clip_value must be given together; only"
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
