"""Flash attention on packed rows by Pallas kernels for GPUs.

A block of queries reads two ranges of key blocks: those of its prefixes, and
those from the start of its segments, or of its window, to its last position. A
block of keys reads one range of query blocks for its gradients. Blocks of other
samples are skipped. The query heads of a KV head read it in place: keys and
values are never repeated, and the sum of their gradients over these heads stays
in registers.

Reference: Dao 2023, FlashAttention-2, arXiv 2307.08691.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxrl_llm.models.attention import MASKED, in_reach

# Most rows and bytes of a block of queries, keys or values. With these, the
# compiler for H100s spills next to no registers, and no kernel needs more than
# 99 KiB of shared memory, which GPUs have since Ampere. None has been timed.
_BLOCK, _BLOCK_BYTES = 64, 2**14
# Triton divides integers towards zero only.
div, rem = jax.lax.div, jax.lax.rem


def attend(q, k, v, queries, keys, window):
  """Attends in rows of any length, padded to whole blocks.

  Args:
    q: [R, Q, H, d].
    k: [R, T, K, d].
    v: [R, T, K, d].
    queries: int32 [R, 3, Q]: position in the row, segment, prefix (-1: none).
    keys: int32 [R, T], segments.
    window: as in `attention.packed_attention`.
  """
  count, block = q.shape[1], block_size(q, q.shape[1])
  q, k, v = (pad(x, 1, block) for x in (q, k, v))
  rows = find_blocks(queries, keys, block, window)
  return _attention(q, k, v, rows, block, window)[:, :count]


def block_size(x, length):
  """Returns the rows of a block; matrix products need at least 16."""
  most = _BLOCK_BYTES // (x.shape[-1] * x.dtype.itemsize)
  return max(16, min(_BLOCK, most, pl.next_power_of_2(length)))


def pad(x, axis, block, value=0):
  """Pads an axis to whole blocks."""
  widths = [(0, -n % block * (i == axis)) for i, n in enumerate(x.shape)]
  return jnp.pad(x, widths, constant_values=value)


def find_blocks(queries, keys, block, window):
  """Finds the blocks of keys that each block of queries may see.

  Compares the ranges of their segment numbers: segments need not be in order,
  but if they are, hardly any block is read in vain.

  Args:
    queries: int32 [R, 3, Q], as in `attend`.
    keys: int32 [R, T].
    block: queries and keys per block.
    window: as in `attention.packed_attention`.

  Returns:
    What the kernels read: queries and keys, padded; the two ranges of key
    blocks that each block of queries reads, int32 [R, Q / block, 4], each as
    first block and length; and likewise the range of query blocks that each
    block of keys reads, int32 [R, T / block, 2].
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
    earliest = jnp.where(index < 0, keys.shape[1], index)  # Without padding.
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


def _range(needed):
  """Returns the first True of [R, N, n], and the length to the last one."""
  first, after = jnp.argmax(needed, 2), jnp.argmax(needed[..., ::-1], 2)
  length = jnp.where(jnp.any(needed, 2), needed.shape[2] - after - first, 0)
  return jnp.stack([first, length], axis=2).astype(jnp.int32)


def pallas_call(kernel, grid, out_shape, *arguments):
  """Runs a kernel on references to whole arrays."""
  function = getattr(kernel, "func", kernel)
  return pl.pallas_call(
    kernel,
    grid=grid,
    out_shape=out_shape,
    name=function.__name__.strip("_"),  # In profiles and compiled programs.
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
  )(*arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=[4, 5])
def _attention(q, k, v, rows, block, window):
  return _attention_fwd(q, k, v, rows, block, window)[0]


def _attention_fwd(q, k, v, rows, block, window):
  out, lse = forward(q, k, v, rows, block, window)
  return out, (q, k, v, rows, out, lse)


def _attention_bwd(block, window, residuals, g):
  q, k, v, (queries, keys, key_ranges, query_range), out, lse = residuals
  delta = jnp.sum(out.astype(jnp.float32) * g, axis=3).swapaxes(1, 2)
  arguments = q, k, v, g, lse, delta, queries, keys
  d_q = pallas_call(
    functools.partial(_flash_backward_queries, block, window),
    (q.shape[1] // block, len(q), q.shape[2]),
    *(q, *arguments, key_ranges),
  )
  d_k, d_v = pallas_call(
    functools.partial(_flash_backward_keys, block, window),
    (k.shape[1] // block, len(k), k.shape[2]),
    *((k, v), *arguments, query_range),
  )
  return d_q, d_k, d_v, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def forward(q, k, v, rows, block, window, *, interleaved=False):
  """Returns outputs [R, Q, H, d] and log2 of their denominators [R, H, Q].

  If `interleaved`, k and v are one array with the value of each head after its
  key.
  """
  count, time, heads, _ = q.shape
  return pallas_call(
    functools.partial(_flash_forward, block, window, 1 + interleaved),
    (time // block, count, heads),
    (q, jax.ShapeDtypeStruct((count, heads, time), jnp.float32)),
    *(q, k, v, *rows[:3]),
  )


def _flash_forward(
  block, window, step, q_ref, k_ref, v_ref, queries_ref, keys_ref, ranges_ref,
  out_ref, lse_ref,
):  # fmt: skip
  index, row, head = (pl.program_id(i) for i in range(3))
  here = pl.ds(index * block, block)
  key_head = step * div(head, step * q_ref.shape[2] // k_ref.shape[2])
  q, queries = q_ref[row, here, head], _queries(queries_ref, row, here)

  def body(i, carry):
    at = _block_at(ranges_ref, row, index, i, block)
    visible = _visible(queries, at, keys_ref[row, at], window)
    scores = jnp.where(visible, scores_of(q, k_ref[row, at, key_head]), MASKED)
    return softmax_step(scores, v_ref[row, at, key_head + step - 1], carry)

  count = ranges_ref[row, index, 1] + ranges_ref[row, index, 3]
  out, top, total = jax.lax.fori_loop(0, count, body, softmax_start(q))
  total = jnp.where(total > 0, total, 1.0)  # Padding may see no block.
  out_ref[row, here, head] = (out / total[:, None]).astype(q.dtype)
  lse_ref[row, head, here] = top + jnp.log2(total)


def _flash_backward_queries(
  block, window, q_ref, k_ref, v_ref, g_ref, lse_ref, delta_ref, queries_ref,
  keys_ref, ranges_ref, d_q_ref,
):  # fmt: skip
  index, row, head = (pl.program_id(i) for i in range(3))
  here, group = pl.ds(index * block, block), q_ref.shape[2] // k_ref.shape[2]
  kv_head, queries = div(head, group), _queries(queries_ref, row, here)
  q, g = q_ref[row, here, head], g_ref[row, here, head]
  lse = lse_ref[row, head, here][:, None]
  delta = delta_ref[row, head, here][:, None]

  def body(i, d_q):
    at = _block_at(ranges_ref, row, index, i, block)
    visible = _visible(queries, at, keys_ref[row, at], window)
    k, v = k_ref[row, at, kv_head], v_ref[row, at, kv_head]
    weights = jnp.exp2(scores_of(q, k) - lse)
    d_weights = dot(g, v, of_b=1)
    d_scores = jnp.where(visible, weights * (d_weights - delta), 0.0)
    return d_q + dot(d_scores.astype(k.dtype), k)

  d_q = jnp.zeros(q.shape, jnp.float32)
  count = ranges_ref[row, index, 1] + ranges_ref[row, index, 3]
  d_q = jax.lax.fori_loop(0, count, body, d_q) * q.shape[1] ** -0.5
  d_q_ref[row, here, head] = d_q.astype(q.dtype)


def _flash_backward_keys(
  block, window, q_ref, k_ref, v_ref, g_ref, lse_ref, delta_ref, queries_ref,
  keys_ref, range_ref, d_k_ref, d_v_ref,
):  # fmt: skip
  index, row, kv_head = (pl.program_id(i) for i in range(3))
  here, group = pl.ds(index * block, block), q_ref.shape[2] // k_ref.shape[2]
  k, v = k_ref[row, here, kv_head], v_ref[row, here, kv_head]
  keys, first = keys_ref[row, here], range_ref[row, index, 0]

  def body(i, carry):
    d_k, d_v = carry
    at = pl.ds((first + div(i, group)) * block, block)
    head = kv_head * group + rem(i, group)
    queries = _queries(queries_ref, row, at, axis=0)
    visible = _visible(queries, here, keys, window, axis=1)
    q, g = q_ref[row, at, head], g_ref[row, at, head]
    weights = jnp.exp2(scores_of(k, q) - lse_ref[row, head, at][None])
    weights = jnp.where(visible, weights, 0.0)
    d_weights = dot(v, g, of_b=1) - delta_ref[row, head, at][None]
    d_k += dot((weights * d_weights).astype(q.dtype), q)
    return d_k, d_v + dot(weights.astype(g.dtype), g)

  zeros, count = jnp.zeros(k.shape, jnp.float32), range_ref[row, index, 1]
  d_k, d_v = jax.lax.fori_loop(0, count * group, body, (zeros, zeros))
  d_k_ref[row, here, kv_head] = (d_k * k.shape[1] ** -0.5).astype(k.dtype)
  d_v_ref[row, here, kv_head] = d_v.astype(v.dtype)


def _block_at(ranges_ref, row, index, i, block):
  """Returns the slice of the i-th block of two ranges."""
  far, count, near = (ranges_ref[row, index, j] for j in range(3))
  return pl.ds(jnp.where(i < count, far + i, near + i - count) * block, block)


def _queries(queries_ref, row, at, axis=1):
  """Returns positions, segments and prefixes of queries, [Q, 1] each."""
  return [jnp.expand_dims(queries_ref[row, i, at], axis) for i in range(3)]


def _visible(queries, at, keys, window, axis=0):
  """Returns which keys, at a slice of the row, each query sees: [Q, T]."""
  index, own, prefix = queries
  place = jnp.expand_dims(at.start + jnp.arange(at.size), axis)
  keys = jnp.expand_dims(keys, axis)
  return ((keys == own) | (keys == prefix)) & in_reach(place, index, window)


def scores_of(q, k):
  """Returns scaled scores [Q, T] times log2(e): exp2 gives their weights."""
  return dot(q, k, of_b=1) * (math.log2(math.e) * q.shape[1] ** -0.5)


def softmax_start(q):
  """Returns weighted sum, maximum and denominator over no keys."""
  empty = jnp.zeros(q.shape[0], jnp.float32)
  return jnp.zeros(q.shape, jnp.float32), empty + MASKED, empty


def softmax_step(scores, v, carry):
  """Adds a block of keys."""
  out, top, total = carry
  new_top = jnp.maximum(top, jnp.max(scores, axis=1))
  weights = jnp.exp2(scores - new_top[:, None])
  rescale = jnp.exp2(top - new_top)
  out = out * rescale[:, None] + dot(weights.astype(v.dtype), v)
  return out, new_top, total * rescale + jnp.sum(weights, axis=1)


def dot(a, b, axis=1, of_b=0):
  """Returns the product over an axis of a and one of b, in float32."""
  contract = (((axis,), (of_b,)), ((), ()))
  return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)
