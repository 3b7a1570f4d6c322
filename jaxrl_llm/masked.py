"""Masked and segment reductions that are robust to padding.

Every function selects *before* it computes: masked elements, NaN included,
change neither the value nor the gradient. A mask is True (or non-zero) for
elements that count. Results are float32.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.arrays import of_equal_shape
from jaxrl_llm.errors import check_choice, check_number

# Modes of `token_weights` that divide by a constant length.
NORM_MODES = ("seq-mean-token-sum-norm", "dr-grpo")
SUM_MODES = NORM_MODES[:1]  # The divisor does not depend on the batch.

Axis = int | Sequence[int] | None


@of_equal_shape("x", "mask")
def masked_fill(
  x: chex.Array, mask: chex.Array, *, value: float = 0.0
) -> jax.Array:
  """Returns x where the mask is True and a constant elsewhere.

  Use it to make padding inert before calling a function that takes no mask,
  such as a per-token loss.

  Args:
    x: any shape.
    mask: same shape as x.
    value: the constant.

  Returns:
    float32, shape of x.
  """
  x = jnp.asarray(x, jnp.float32)
  return jnp.where(jnp.asarray(mask, bool), x, value)


def masked_count(
  mask: chex.Array, *, axis: Axis = None, keepdims: bool = False
) -> jax.Array:
  """Counts the True elements of a mask, as float32."""
  mask = jnp.asarray(mask, bool)
  return jnp.sum(mask, axis=axis, keepdims=keepdims, dtype=jnp.float32)


def masked_sum(
  x: chex.Array, mask: chex.Array, *, axis: Axis = None, keepdims: bool = False
) -> jax.Array:
  """Sum of x over the elements that count; 0 if there are none."""
  return jnp.sum(masked_fill(x, mask), axis=axis, keepdims=keepdims)


def masked_mean(
  x: chex.Array, mask: chex.Array, *, axis: Axis = None, keepdims: bool = False
) -> jax.Array:
  """Mean of x over the elements that count; 0 if there are none."""
  total = masked_sum(x, mask, axis=axis, keepdims=keepdims)
  count = masked_count(mask, axis=axis, keepdims=keepdims)
  return total / jnp.maximum(count, 1.0)


def masked_var(
  x: chex.Array, mask: chex.Array, *, axis: Axis = None, keepdims: bool = False
) -> jax.Array:
  """Variance of x over the elements that count: Σ(x - x̄)² / (n - 1).

  Args:
    x: any shape.
    mask: same shape as x.
    axis: axes to reduce; None reduces all.
    keepdims: keep the reduced axes with size one.

  Returns:
    float32; 0 where fewer than two elements count.
  """
  mean = masked_mean(x, mask, axis=axis, keepdims=True)
  centered = masked_fill(masked_fill(x, mask) - mean, mask)
  squares = jnp.sum(jnp.square(centered), axis=axis, keepdims=keepdims)
  count = masked_count(mask, axis=axis, keepdims=keepdims)
  return squares / jnp.maximum(count - 1.0, 1.0)


def masked_max(
  x: chex.Array, mask: chex.Array, *, axis: Axis = None, keepdims: bool = False
) -> jax.Array:
  """Maximum of x over the elements that count; 0 if there are none."""
  x = masked_fill(x, mask, value=-jnp.inf)
  largest = jnp.max(x, axis=axis, keepdims=keepdims)
  return jnp.where(jnp.any(mask, axis=axis, keepdims=keepdims), largest, 0.0)


def explained_variance(
  values: chex.Array, returns: chex.Array, mask: chex.Array
) -> jax.Array:
  """Fraction of the returns' variance that a critic explains.

  EV = 1 - Var(G - V) / Var(G): 1 for a perfect critic, 0 for a constant one,
  negative for a critic that is worse than a constant.

  Args:
    values: predictions V, any shape.
    returns: targets G, same shape.
    mask: same shape.

  Returns:
    float32 scalar; 0 if the returns are constant.
  """
  returns = masked_fill(returns, mask)
  unexplained = masked_var(returns - masked_fill(values, mask), mask)
  # Relative to the maximum, the variance of equal returns is exactly 0.
  total = masked_var(returns - masked_max(returns, mask), mask)
  varies = total > 0.0
  share = 1.0 - unexplained / jnp.where(varies, total, 1.0)
  return jnp.where(varies, share, 0.0)


def token_weights(
  mask: chex.Array,
  *,
  mode: str,
  norm: chex.Numeric | None = None,
  size: chex.Numeric | None = None,
  xp: Any = jnp,
) -> jax.Array:
  """Returns weights w such that Σ w·loss is a reduction of per-token losses.

  With n_i tokens in sequence i and S nonempty sequences:

    token-mean               1 / Σ n_i
    seq-mean-token-mean      1 / (S n_i)
    seq-mean-token-sum       1 / S
    seq-mean-token-sum-norm  1 / norm   (as in verl, without the factor 1 / S)
    dr-grpo                  1 / (S norm)

  Compute the weights once over the global batch, so that micro-batches and
  devices only add. Empty sequences do not count.

  Args:
    mask: [..., T], time last; the leading axes are sequences.
    mode: a name in the table above.
    norm: constant length of the last two modes, in tokens, usually the
      generation limit; must be None for the other modes.
    size: `reduction_size` of the whole batch if `mask` is only a part of it;
      by default that of `mask`.
    xp: array module. `numpy` computes the same bits on the host, without
      waiting for the device.

  Returns:
    float32 [..., T]; 0 in masked slots, and all 0 for an empty mask.

  Raises:
    ValueError: for an unknown mode, or a norm that is missing, not allowed or
      not positive.

  Reference: Yu et al. 2025 (DAPO), arXiv:2503.14476, equation 8; Liu et al.
    2025 (Dr. GRPO), arXiv:2503.20783.
  """
  check_mode(mode, norm)
  counts = xp.asarray(mask, bool).astype(xp.float32)
  lengths = counts.sum(axis=-1, keepdims=True)
  size = reduction_size(mask, mode=mode, xp=xp) if size is None else size
  divisor = xp.float32(size) * xp.float32(MODES[mode].length(lengths, norm))
  return counts / xp.broadcast_to(divisor, counts.shape)


def check_mode(mode: str, norm: chex.Numeric | None) -> None:
  """Raises ValueError as `token_weights` does."""
  check_choice("mode", mode, MODES)
  if (norm is not None) != (mode in NORM_MODES):
    raise ValueError(
      f"norm={norm!r} with mode={mode!r}: norm is required by"
      f" {sorted(NORM_MODES)} and by no other mode"
    )
  check_number("norm", norm, "(0, inf]")


def reduction_size(mask: chex.Array, *, mode: str, xp: Any = jnp) -> jax.Array:
  """Returns a reduction's divisor over the batch: tokens, sequences or 1.

  If each part of a batch is weighted with size 1, the sum of their losses is
  the loss of the batch times its size.

  Args:
    mask: [..., T], as in `token_weights`.
    mode: as in `token_weights`.
    xp: as in `token_weights`.

  Returns:
    float32 scalar, at least 1.
  """
  lengths = xp.asarray(mask, bool).sum(axis=-1, dtype=xp.float32)
  return xp.maximum(xp.float32(MODES[mode].size(lengths)), 1.0)


class _Reduction(NamedTuple):
  """The two factors of the divisor of a token's loss."""

  size: Callable[[jax.Array], chex.Numeric]  # (tokens per sequence) -> scalar.
  # (tokens per sequence, norm) -> factor of each sequence.
  length: Callable[[jax.Array, Any], chex.Numeric] = lambda lengths, norm: 1.0


# These use only methods that both NumPy and JAX arrays have.
_sequences = lambda lengths: (lengths > 0).sum()
_norm = lambda lengths, norm: norm
MODES: dict[str, _Reduction] = {
  "token-mean": _Reduction(lambda lengths: lengths.sum()),
  "seq-mean-token-mean": _Reduction(
    _sequences, lambda lengths, norm: lengths.clip(1.0)
  ),
  "seq-mean-token-sum": _Reduction(_sequences),
  "seq-mean-token-sum-norm": _Reduction(lambda lengths: 1.0, _norm),
  "dr-grpo": _Reduction(_sequences, _norm),
}


def segment_count(segments: chex.Array, *, num_segments: int) -> jax.Array:
  """Number of elements per segment, float32 [num_segments].

  Here and below: `segments` is int [N] and need not be sorted; elements whose
  index is outside [0, num_segments) are ignored.
  """
  ones = jnp.ones(jnp.shape(segments))
  return segment_sum(ones, segments, num_segments=num_segments)


def segment_sum(
  x: chex.Array, segments: chex.Array, *, num_segments: int
) -> jax.Array:
  """Sum of x per segment, float32 [num_segments]; 0 for an empty segment."""
  x, segments = _inside(x, segments, num_segments)
  return jax.ops.segment_sum(x, segments, num_segments)


def segment_mean(
  x: chex.Array, segments: chex.Array, *, num_segments: int
) -> jax.Array:
  """Mean of x per segment, float32 [num_segments]; 0 for an empty segment."""
  total = segment_sum(x, segments, num_segments=num_segments)
  count = segment_count(segments, num_segments=num_segments)
  return total / jnp.maximum(count, 1.0)


def segment_min(
  x: chex.Array, segments: chex.Array, *, num_segments: int
) -> jax.Array:
  """Minimum of x per segment, float32 [num_segments]; 0 if empty."""
  x, segments = _inside(x, segments, num_segments)
  least = jax.ops.segment_min(x, segments, num_segments)
  count = segment_count(segments, num_segments=num_segments)
  return jnp.where(count > 0, least, 0.0)


def segment_std(
  x: chex.Array, segments: chex.Array, *, num_segments: int
) -> jax.Array:
  """Standard deviation of x per segment, √(Σ(x - x̄)² / (n - 1)).

  Args:
    x: [N].
    segments: int [N].
    num_segments: number of segments.

  Returns:
    float32 [num_segments]; 0, with gradient 0, for fewer than two elements.
  """
  x, segments = _inside(x, segments, num_segments)
  mean = segment_mean(x, segments, num_segments=num_segments)
  centered = x - jnp.append(mean, 0.0)[segments]
  squares = jax.ops.segment_sum(jnp.square(centered), segments, num_segments)
  count = segment_count(segments, num_segments=num_segments)
  variance = squares / jnp.maximum(count - 1.0, 1.0)
  # The gradient of √ is infinite at 0 and would become NaN.
  varies = variance > 0.0
  return jnp.where(varies, jnp.sqrt(jnp.where(varies, variance, 1.0)), 0.0)


def segment_median(
  x: chex.Array, segments: chex.Array, *, num_segments: int
) -> jax.Array:
  """Median of x per segment; the mean of the two middle elements if n is even.

  Args:
    x: [N].
    segments: int [N].
    num_segments: number of segments.

  Returns:
    float32 [num_segments]; 0 for an empty segment.
  """
  # One sort by (segment, value) makes each segment contiguous.
  x, segments = _inside(x, segments, num_segments)
  _, ordered = jax.lax.sort((segments, x), num_keys=2)
  count = segment_count(segments, num_segments=num_segments)
  count = count.astype(jnp.int32)
  start = jnp.cumsum(count) - count
  lower = ordered.at[start + jnp.maximum(count - 1, 0) // 2].get(mode="clip")
  upper = ordered.at[start + count // 2].get(mode="clip")
  return jnp.where(count > 0, 0.5 * (lower + upper), 0.0)


def _inside(
  x: chex.Array, segments: chex.Array, num_segments: int
) -> tuple[jax.Array, jax.Array]:
  """Moves elements outside all segments, as 0, into an extra last segment."""
  check_number("num_segments", num_segments, "[1, inf)")
  chex.assert_rank(segments, 1)
  chex.assert_type(segments, int)
  inside = (segments >= 0) & (segments < num_segments)
  return masked_fill(x, inside), jnp.where(inside, segments, num_segments)
