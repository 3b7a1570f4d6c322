"""Flash attention on packed rows with Pallas kernels for GPUs.

A block of queries reads two ranges of key blocks: the blocks of its prefixes,
and the blocks from the start of its segments, or of its window, up to its last
position. For the gradients, a block of keys reads one range of query blocks.
Blocks of other samples are skipped. All query heads of a KV head read it in
place: keys and values are never repeated, and their gradients are summed over
these heads in registers.

Reference: Dao 2023, FlashAttention-2, arXiv 2307.08691.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxrl_llm.models.attention import MASKED, in_reach
from jaxrl_llm.models.context import pad

# Maximum rows and bytes of a block of queries, keys or values. With these, the
# compiler for H100s spills almost no registers, and every kernel fits in 99 KiB
# of shared memory, which all GPUs since Ampere have. No size has been timed.
_BLOCK, _BLOCK_BYTES = 64, 2**14
# Triton only divides integers towards zero.
div, rem = jax.lax.div, jax.lax.rem
Refs = tuple[Ref, ...]
_Carry = tuple[Array, Array, Array]  # See `softmax_start`.


class _Shape(NamedTuple):
  """Static sizes of a kernel; each combination compiles a program."""

  block: int  # Queries and keys per block.
  window: int | None
  step: int = 1  # Distance of two heads of k; 2 if v is interleaved with it.


def attend(
  q: Array,
  k: Array,
  v: Array,
  queries: Array,
  keys: Array,
  window: int | None,
  *,
  interleaved: bool = False,
):
  """Computes attention on rows of any length, padded to whole blocks.

  Args:
    q: [R, Q, H, d].
    k: [R, T, K, d].
    v: [R, T, K, d].
    queries: int32 [R, 3, Q]: position in the row, segment, prefix (-1: none).
    keys: int32 [R, T], segments.
    window: as in `attention.packed_attention`.
    interleaved: whether k and v are the same array [R, T, 2K, d], in which the
      value of each head follows its key; it has no gradient.
  """
  count, block = q.shape[1], block_size(q, q.shape[1])
  q, k, v = (pad(x, 1, block) for x in (q, k, v))
  rows = find_blocks(queries, keys, block, window)
  shape = _Shape(block, window, 1 + interleaved)
  out = _attention(q, k, v, rows, shape)
  return out[:, :count]


def block_size(x: Array, length: int):
  """Returns the number of rows of a block; matrix products need at least 16."""
  most = _BLOCK_BYTES // (x.shape[-1] * x.dtype.itemsize)
  return max(16, min(_BLOCK, most, pl.next_power_of_2(length)))


def find_blocks(queries: Array, keys: Array, block: int, window: int | None):
  """Finds the key blocks that each block of queries may attend to.

  Compares the blocks' ranges of segment numbers: segments need not be in order,
  but if they are, almost no block is read unnecessarily.

  Args:
    queries: int32 [R, 3, Q], as in `attend`.
    keys: int32 [R, T].
    block: queries and keys per block.
    window: as in `attention.packed_attention`.

  Returns:
    Arrays that the kernels read: queries and keys, padded; the two ranges of
    key blocks that each block of queries reads, int32 [R, Q / block, 4], each
    as first block and length; and the range of query blocks that each block of
    keys reads, int32 [R, T / block, 2], in the same form.
  """
  queries, keys = pad(queries, 2, block, -2), pad(keys, 1, block, -3)
  blocks = lambda x: x.reshape(*x.shape[:-1], -1, block)
  order = lambda x: jnp.where(x > 0, x, jnp.iinfo(jnp.int32).max)  # 0 is last.
  index, own, prefix = (blocks(queries[:, i])[:, :, None] for i in range(3))
  by_key = blocks(order(keys))[:, None]
  first, last = jnp.min(by_key, axis=3), jnp.max(by_key, axis=3)
  place = jnp.arange(first.shape[2])[None, None]
  reach = place * block <= jnp.max(index, axis=3)
  if window is not None:
    earliest = jnp.where(index < 0, keys.shape[1], index)  # Ignores padding.
    reach &= (place + 1) * block > jnp.min(earliest, axis=3) + 1 - window
  needed = lambda low, high: (
    reach & (jnp.min(low, axis=3) <= last) & (jnp.max(high, axis=3) >= first)
  )
  segment = needed(order(own), order(own))
  prefix = needed(order(prefix), prefix)
  start = _range(segment)[..., :1]
  far = _range(prefix & (place < start))
  near = _range(segment | (prefix & (place >= start)))
  query_range = _range((segment | prefix).swapaxes(1, 2))
  return queries, keys, jnp.append(far, near, axis=2), query_range


def _range(needed: Array):
  """Returns the first True of [R, N, n], and the length up to the last True."""
  first, after = jnp.argmax(needed, 2), jnp.argmax(needed[..., ::-1], 2)
  length = jnp.where(jnp.any(needed, 2), needed.shape[2] - after - first, 0)
  return jnp.stack([first, length], axis=2).astype(jnp.int32)


def pallas_call(
  kernel: Callable,
  grid: tuple[int, ...],
  out_shape: Any,
  *arguments,
  num_warps: int = 4,
):
  """Runs a kernel on references to whole arrays."""
  function = getattr(kernel, "func", kernel)
  return pl.pallas_call(
    kernel,
    grid=grid,
    out_shape=out_shape,
    name=function.__name__.strip("_"),  # In profiles and compiled programs.
    compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=2),
  )(*arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=[4])
def _attention(*arguments):
  return _forward(*arguments)[0]


def _forward(
  q: Array, k: Array, v: Array, rows: tuple[Array, ...], shape: _Shape
):
  count, time, heads, _ = q.shape
  out, lse = pallas_call(
    functools.partial(_flash_forward, shape),
    (time // shape.block, count, heads),
    # The second result is log2 of the denominators.
    (q, jax.ShapeDtypeStruct((count, heads, time), jnp.float32)),
    *((q, k, v), rows[:3]),
  )
  return out, (q, k, v, rows, out, lse)


def _backward(shape: _Shape, residuals: tuple[Any, ...], g: Array):
  # Interleaved arrays have no gradients.
  q, k, v, (queries, keys, key_ranges, query_range), out, lse = residuals
  delta = jnp.sum(out.astype(jnp.float32) * g, axis=3).swapaxes(1, 2)
  arrays = q, k, v, g, lse, delta
  d_q = pallas_call(
    functools.partial(_flash_backward_queries, shape),
    (q.shape[1] // shape.block, len(q), q.shape[2]),
    *(q, arrays, (queries, keys, key_ranges)),
  )
  d_k, d_v = pallas_call(
    functools.partial(_flash_backward_keys, shape),
    (k.shape[1] // shape.block, len(k), k.shape[2]),
    *((k, v), arrays, (queries, keys, query_range)),
  )
  return d_q, d_k, d_v, None


_attention.defvjp(_forward, _backward)


def _flash_forward(
  shape: _Shape, arrays: Refs, rows: Refs, out_ref: Ref, lse_ref: Ref
):
  q_ref, k_ref, v_ref = arrays
  row, head, here = _program(shape.block)
  step = shape.step
  key_head = step * div(head, step * q_ref.shape[2] // k_ref.shape[2])
  q = q_ref[row, here, head]

  def add(at: pl.Slice, visible: Array, carry: _Carry):
    k, v = k_ref[row, at, key_head], v_ref[row, at, key_head + step - 1]
    return softmax_step(q, k, v, visible, carry)

  out, top, total = _over_keys(shape, rows, add, softmax_start(q))
  total = jnp.where(total > 0, total, 1.0)  # Padding may have read no block.
  out_ref[row, here, head] = (out / total[:, None]).astype(q.dtype)
  lse_ref[row, head, here] = top + jnp.log2(total)


def _flash_backward_queries(
  shape: _Shape, arrays: Refs, rows: Refs, d_q_ref: Ref
):
  q_ref, k_ref, v_ref, g_ref, lse_ref, delta_ref = arrays
  row, head, here = _program(shape.block)
  kv_head = div(head, q_ref.shape[2] // k_ref.shape[2])
  q, g = q_ref[row, here, head], g_ref[row, here, head]
  lse, delta = (x[row, head, here][:, None] for x in (lse_ref, delta_ref))

  def add(at: pl.Slice, visible: Array, d_q: Array):
    k, v = k_ref[row, at, kv_head], v_ref[row, at, kv_head]
    weights = jnp.exp2(scores_of(q, k) - lse)
    d_weights = dot(g, v, of_b=1)
    d_scores = jnp.where(visible, weights * (d_weights - delta), 0.0)
    return d_q + dot(d_scores.astype(k.dtype), k)

  d_q = jnp.zeros(q.shape, jnp.float32)
  d_q = _over_keys(shape, rows, add, d_q) * q.shape[1] ** -0.5
  d_q_ref[row, here, head] = d_q.astype(q.dtype)


def _flash_backward_keys(
  shape: _Shape, arrays: Refs, rows: Refs, d_k_ref: Ref, d_v_ref: Ref
):
  q_ref, k_ref, v_ref, g_ref, lse_ref, delta_ref = arrays
  queries_ref, keys_ref, range_ref = rows
  row, kv_head, here = _program(shape.block)
  group = q_ref.shape[2] // k_ref.shape[2]
  k, v = k_ref[row, here, kv_head], v_ref[row, here, kv_head]
  keys = keys_ref[row, here]
  first, count = (range_ref[row, pl.program_id(0), i] for i in range(2))

  def body(i: Array, carry: Any):
    d_k, d_v = carry
    at = pl.ds((first + div(i, group)) * shape.block, shape.block)
    head = kv_head * group + rem(i, group)
    queries = _queries(queries_ref, row, at, axis=0)
    visible = _visible(queries, here, keys, shape.window, axis=1)
    q, g = q_ref[row, at, head], g_ref[row, at, head]
    weights = jnp.exp2(scores_of(k, q) - lse_ref[row, head, at][None])
    weights = jnp.where(visible, weights, 0.0)
    d_weights = dot(v, g, of_b=1) - delta_ref[row, head, at][None]
    d_k += dot((weights * d_weights).astype(q.dtype), q)
    return d_k, d_v + dot(weights.astype(g.dtype), g)

  zeros = jnp.zeros(k.shape, jnp.float32)
  d_k, d_v = jax.lax.fori_loop(0, count * group, body, (zeros, zeros))
  d_k_ref[row, here, kv_head] = (d_k * k.shape[1] ** -0.5).astype(k.dtype)
  d_v_ref[row, here, kv_head] = d_v.astype(v.dtype)


def _program(block: int):
  """Returns the row and head of this program, and the slice of its tokens."""
  return *map(pl.program_id, (1, 2)), pl.ds(pl.program_id(0) * block, block)


def _over_keys(shape: _Shape, rows: Refs, add: Callable[..., Any], carry: Any):
  """Loops over the key blocks that this program's queries may attend to.

  Args:
    shape: what the program is compiled for.
    rows: references to queries, keys and ranges of key blocks.
    add: (slice of the keys, mask of the keys visible to each query [Q, T],
      carry) -> carry.
    carry: the initial carry.
  """
  queries_ref, keys_ref, ranges_ref = rows
  row, _, here = _program(shape.block)
  queries = _queries(queries_ref, row, here)
  ranges = (ranges_ref[row, pl.program_id(0), i] for i in range(4))
  far, far_count, near, near_count = ranges

  def body(i: Array, carry: Any):
    index = jnp.where(i < far_count, far + i, near + i - far_count)
    at = pl.ds(index * shape.block, shape.block)
    return add(
      at, _visible(queries, at, keys_ref[row, at], shape.window), carry
    )

  return jax.lax.fori_loop(0, far_count + near_count, body, carry)


def _queries(queries_ref: Ref, row: Array, at: pl.Slice, axis: int = 1):
  """Returns the positions, segments and prefixes of queries, each [Q, 1]."""
  return [jnp.expand_dims(queries_ref[row, i, at], axis) for i in range(3)]


def _visible(
  queries: list[Array],
  at: pl.Slice,
  keys: Array,
  window: int | None,
  axis: int = 0,
):
  """Returns the mask [Q, T] of keys in a slice of the row, by query."""
  index, own, prefix = queries
  place = jnp.expand_dims(at.start + jnp.arange(at.size), axis)
  keys = jnp.expand_dims(keys, axis)
  return ((keys == own) | (keys == prefix)) & in_reach(place, index, window)


def scores_of(q: Array, k: Array):
  """Returns scaled scores [Q, T] times log2(e), so that weights are exp2."""
  return dot(q, k, of_b=1) * (math.log2(math.e) * q.shape[1] ** -0.5)


def softmax_start(q: Array):
  """Returns the weighted sum, maximum and denominator over zero keys."""
  empty = jnp.zeros(q.shape[0], jnp.float32)
  return jnp.zeros(q.shape, jnp.float32), empty + MASKED, empty


def softmax_step(q: Array, k: Array, v: Array, visible: Array, carry: _Carry):
  """Adds a block of keys; `visible` [Q, T] selects the keys of each query."""
  out, top, total = carry
  scores = jnp.where(visible, scores_of(q, k), MASKED)
  new_top = jnp.maximum(top, jnp.max(scores, axis=1))
  weights = jnp.exp2(scores - new_top[:, None])
  rescale = jnp.exp2(top - new_top)
  out = out * rescale[:, None] + dot(weights.astype(v.dtype), v)
  return out, new_top, total * rescale + jnp.sum(weights, axis=1)


def dot(a: Array, b: Array, axis: int = 1, of_b: int = 0):
  """Contracts an axis of a with an axis of b, in float32."""
  contract = (((axis,), (of_b,)), ((), ()))
  return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)
