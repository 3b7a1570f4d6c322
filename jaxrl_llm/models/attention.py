"""Attention in plain XLA: of packed rows, and of queries on a KV cache.

Heads are brought before time first, and the G query heads of a key head are
folded into the time axis. The products are then plain batched matrix products
on contiguous memory: on a CPU forward and backward took a half to two thirds
of the time of `jax.nn.dot_product_attention`.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

_MASKED = -1e30  # Finite: a row without any key gives a mean, not NaN.
_QUERY_BLOCK = 512  # Queries at a time in rows longer than twice this.
_MIN_BLOCKS = 64  # Blocks of a paged cache at a time: fewer save no time.


def packed_attention(
  q: chex.Array,
  k: chex.Array,
  v: chex.Array,
  segments: chex.Array,
  prefixes: chex.Array,
) -> jax.Array:
  """softmax(q kᵀ / √d) v, causal, with grouped heads, within segments.

  A query sees the keys not after it of its own segment and of its prefix. In
  long rows queries go block by block and are recomputed in the backward pass,
  so that memory is linear in the length.

  Args:
    q: [B, T, H, d].
    k: [B, T, K, d]; K divides H.
    v: [B, T, K, d].
    segments: int32 [B, T].
    prefixes: int32 [B, T], a further segment that is seen, 0 for none.

  Returns:
    [B, T, H, d] in the dtype of q; scores and softmax are float32.
  """
  chex.assert_rank([q, k, v, segments, prefixes], [4, 4, 4, 2, 2])
  chex.assert_equal_shape_prefix([q, k, v, segments, prefixes], 2)
  time = q.shape[1]
  keys, values = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)

  def block(start, q, own, prefix):
    index = start + jnp.arange(q.shape[1])
    visible = own[:, :, None] == segments[:, None]
    shared = prefix[:, :, None] == segments[:, None]
    visible |= shared & (prefix[:, :, None] > 0)
    visible &= (index[:, None] >= jnp.arange(time)[None])[None]
    return attend(q, keys, values, visible)

  if time <= 2 * _QUERY_BLOCK:
    return block(0, q, segments, prefixes)
  count = -(-time // _QUERY_BLOCK)
  padding = count * _QUERY_BLOCK - time

  def split(x):
    widths = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, widths).reshape(x.shape[0], count, -1, *x.shape[2:])
    return x.swapaxes(0, 1)

  blocks = (
    jnp.arange(count) * _QUERY_BLOCK,
    *map(split, (q, segments, prefixes)),
  )
  out = jax.lax.map(jax.checkpoint(lambda args: block(*args)), blocks)
  out = out.swapaxes(0, 1).reshape(q.shape[0], -1, *q.shape[2:])
  return out[:, :time]


@jax.custom_vjp
def attend(q, keys, values, visible):
  """q [B, Q, H, d], keys [B, K, d, T], values [B, K, T, d], [B, Q, T]."""
  return _attend_fwd(q, keys, values, visible)[0]


def _attend_fwd(q, keys, values, visible):
  q, unfold = _fold(q, keys.shape[1])
  batch, kv_heads, folded, size = q.shape
  queries, time = visible.shape[1:]
  scores = jnp.einsum(
    "bkqd,bkds->bkqs",
    q * size**-0.5,
    keys,
    preferred_element_type=jnp.float32,
  ).reshape(batch, -1, queries, time)
  scores = jnp.where(visible[:, None], scores, _MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  weights = weights.reshape(batch, kv_heads, folded, time)
  out = jnp.einsum(
    "bkqs,bksd->bkqd", weights, values, preferred_element_type=jnp.float32
  ).astype(values.dtype)
  return unfold(out), (q, keys, values, weights, out)


def _attend_bwd(residuals, cotangent):
  """The products over queries keep their [Q, T] operand on the right.

  There it is read as it lies; automatic differentiation puts it on the left,
  and transposing it took a quarter of the time of a training step on a CPU.
  """
  q, keys, values, weights, out = residuals
  g, unfold = _fold(cotangent, keys.shape[1])
  scale = q.shape[-1] ** -0.5
  einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  d_values = einsum("bkqd,bkqs->bkds", g, weights).swapaxes(2, 3)
  d_weights = einsum("bkqd,bksd->bkqs", g, values)
  inner = jnp.sum((g * out).astype(jnp.float32), axis=-1, keepdims=True)
  d_scores = (weights * (d_weights - inner)).astype(q.dtype)
  d_q = einsum("bkqs,bkds->bkqd", d_scores, keys) * scale
  d_keys = einsum("bkqd,bkqs->bkds", q * scale, d_scores)
  return (
    unfold(d_q.astype(q.dtype)),
    d_keys.astype(keys.dtype),
    d_values.astype(values.dtype),
    None,
  )


attend.defvjp(_attend_fwd, _attend_bwd)


def _fold(x, kv_heads):
  """[B, Q, H, d] to [B, K, G·Q, d], and the function that undoes it."""
  batch, queries, heads, size = x.shape
  group = heads // kv_heads

  def unfold(y):
    y = y.reshape(batch, kv_heads, group, queries, size)
    return y.transpose(0, 3, 1, 2, 4).reshape(batch, queries, heads, size)

  x = x.reshape(batch, queries, kv_heads, group, size)
  x = x.transpose(0, 2, 3, 1, 4)
  return x.reshape(batch, kv_heads, group * queries, size), unfold


class BlockTables(NamedTuple):
  """Which pages of a KV cache hold which tokens; D shards of P pages, S slots.

  A sequence is cut into blocks of `page_size` tokens, each in a page. Slots are
  dealt to shards in order, S / D each, and page numbers are local to their
  shard. `page_indices` is what vLLM calls the block table. `blocks` lists the
  same, block by block, for attention that goes through what is there; a page
  may stand there several times, as sequences that begin alike may share it.
  """

  page_indices: chex.Array  # int32 [S, N], page of each block; P for none.
  # int32 [D, C, E, 3], C times E entries (page, slot within the shard, position
  # of the block's first token), first blocks first; slot S / D is no entry.
  blocks: chex.Array
  count: chex.Array  # int32 [], how many of the C have an entry on any shard.


def make_block_tables(
  page_indices: np.ndarray, *, shards: int, pages: int, page_size: int
) -> BlockTables:
  """Block tables on the host; shapes depend on those of the arguments alone.

  Args:
    page_indices: int32 [S, N].
    shards: D.
    pages: P, of a shard.
    page_size: tokens per page.
  """
  slots, width = page_indices.shape
  share = slots // shards
  size = max(share, min(_MIN_BLOCKS, pages))
  blocks = np.zeros((shards, -(-share * width // size) * size, 3), np.int32)
  blocks[..., 1] = share
  most = 0
  for shard, table in enumerate(page_indices.reshape(shards, share, width)):
    block, slot = np.nonzero(table.T < pages)
    entries = table[slot, block], slot, block * page_size
    blocks[shard, : len(slot)] = np.stack(entries, axis=1)
    most = max(most, len(slot))
  blocks = blocks.reshape(shards, -1, size, 3)
  return BlockTables(page_indices, blocks, np.int32(-(-most // size)))


def page_and_offset(
  page_indices: chex.Array,
  positions: chex.Array,
  writing: chex.Array,
  pages: int,
  page_size: int,
) -> tuple[jax.Array, jax.Array]:
  """Where tokens go: (page, index within it); page P is nowhere.

  Args:
    page_indices: int32 [S, N], as in `BlockTables`.
    positions: int32 [S, Q], of the tokens in their sequences.
    writing: bool [S, Q], False: the token is not to be written.
    pages: P, of a shard.
    page_size: tokens per page.
  """
  block = positions // page_size
  page = jnp.take_along_axis(page_indices, block, axis=1, mode="clip")
  # A draft token may lie beyond the longest sequence.
  page = jnp.where(writing & (block < page_indices.shape[1]), page, pages)
  return page, positions % page_size


def write_paged(
  layer: tuple[jax.Array, jax.Array],
  k: chex.Array,
  v: chex.Array,
  block_tables: BlockTables,
  positions: chex.Array,
  writing: chex.Array,
) -> tuple[jax.Array, jax.Array]:
  """Writes the keys and values of Q new tokens a slot into its pages.

  Args:
    layer: keys [D, P, K, d, page_size] and values [D, P, K, page_size, d].
    k: [S, Q, K, d].
    v: [S, Q, K, d].
    block_tables: the pages of each slot.
    positions: int32 [S, Q].
    writing: bool [S, Q], the others leave no trace.
  """
  shards, pages, *_, page_size = layer[0].shape
  page, offset = page_and_offset(
    block_tables.page_indices, positions, writing, pages, page_size
  )
  by_shard = lambda x: x.reshape(shards, -1, *x.shape[2:])

  def write(keys, values, page, offset, k, v):
    k, v = k.astype(keys.dtype), v.astype(values.dtype)
    keys = keys.at[page, :, :, offset].set(k, mode="drop")
    return keys, values.at[page, :, offset].set(v, mode="drop")

  return jax.vmap(write)(*layer, *map(by_shard, (page, offset, k, v)))


def paged_attention(
  q: chex.Array,
  layer: tuple[jax.Array, jax.Array],
  block_tables: BlockTables,
  positions: chex.Array,
) -> jax.Array:
  """Attention of Q queries a slot on the pages of that slot.

  Goes through the blocks in use, some at a time, each with the queries of its
  slot, and adds the partial softmax sums of a slot in the order of its blocks.
  So time follows the sum of lengths by one program for all of them, and the
  result depends neither on the other slots nor on where pages lie.

  Args:
    q: [S, Q, H, d].
    layer: keys [D, P, K, d, page_size] and values [D, P, K, page_size, d].
    block_tables: the pages of each slot.
    positions: int32 [S, Q]; a query sees its own position and those before.

  Returns:
    [S, Q, H, d] in the dtype of q; scores and softmax are float32. 0 for a
    slot without pages.
  """
  shards, shard_slots = len(layer[0]), len(q) // len(layer[0])
  q, unfold = _fold(q * q.shape[3] ** -0.5, layer[0].shape[2])
  by_shard = lambda x: x.reshape(shards, shard_slots, *x.shape[1:])
  attend_shard = functools.partial(_attend_blocks, block_tables.count)
  out = jax.vmap(attend_shard)(
    by_shard(q), *layer, block_tables.blocks, by_shard(positions)
  )
  return unfold(out.reshape(-1, *out.shape[2:]).astype(q.dtype))


def _attend_blocks(count, q, keys, values, blocks, positions):
  """`paged_attention` of a shard, queries folded to [S / D, K, G·Q, d]."""
  slots, kv_heads, folded, size = q.shape
  queries, page_size = positions.shape[1], keys.shape[3]
  take = lambda x, index: x.at[index].get(mode="promise_in_bounds")
  einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def entries(i):
    page, slot, start = jnp.moveaxis(take(blocks, i), -1, 0)
    return page, slot, jnp.minimum(slot, slots - 1), start

  def score(i, carry):
    scores, top = carry
    page, slot, held, start = entries(i)
    new = einsum("pkqd,pkdl->pkql", take(q, held), take(keys, page))
    index = start[:, None] + jnp.arange(page_size)[None]
    visible = index[:, None] <= take(positions, held)[:, :, None]
    visible &= (slot < slots)[:, None, None]  # [E, Q, page_size].
    split = new.reshape(len(slot), kv_heads, -1, queries, page_size)
    new = jnp.where(visible[:, None, None], split, _MASKED).reshape(new.shape)
    top = top.at[slot].max(jnp.max(new, axis=-1), mode="drop")
    return scores.at[i].set(new, mode="promise_in_bounds"), top

  def mix(i, carry):
    total, out = carry
    page, slot, held, _ = entries(i)
    weights = jnp.exp(take(scores, i) - take(top, held)[..., None])
    mixed = einsum(
      "pkql,pkld->pkqd", weights.astype(values.dtype), take(values, page)
    )
    total = total.at[slot].add(jnp.sum(weights, axis=-1), mode="drop")
    return total, out.at[slot].add(mixed, mode="drop")

  rows = (slots, kv_heads, folded)
  shape = (*blocks.shape[:2], kv_heads, folded, page_size)
  start = jax.lax.empty(shape, jnp.float32), jnp.full(rows, -jnp.inf)
  scores, top = jax.lax.fori_loop(0, count, score, start)
  start = jnp.zeros(rows), jnp.zeros((*rows, size))
  total, out = jax.lax.fori_loop(0, count, mix, start)
  return out / jnp.where(total > 0, total, 1.0)[..., None]


def write_contiguous(
  layer: tuple[jax.Array, jax.Array],
  k: chex.Array,
  v: chex.Array,
  start: chex.Numeric,
) -> tuple[jax.Array, jax.Array]:
  """Writes the keys and values of Q new tokens a sequence, from a position on.

  Args:
    layer: keys [N, K, d, T] and values [N, K, T, d].
    k: [N, Q, K, d].
    v: [N, Q, K, d].
    start: int32 scalar, position of the first.
  """
  write = jax.lax.dynamic_update_slice_in_dim
  keys, values = layer
  keys = write(keys, k.transpose(0, 2, 3, 1), start, axis=3)
  return keys, write(values, v.swapaxes(1, 2), start, axis=2)


def prefill_attention(
  q: chex.Array, layer: tuple[jax.Array, jax.Array], start: chex.Numeric
) -> jax.Array:
  """Causal attention of Q queries a sequence on a contiguous cache.

  Args:
    q: [N, Q, H, d], of positions start, start + 1, ...
    layer: keys [N, K, d, T] and values [N, K, T, d].
    start: int32 scalar.

  Returns:
    [N, Q, H, d] in the dtype of q; scores and softmax are float32.
  """
  time = layer[0].shape[3]
  positions = start + jnp.arange(q.shape[1])
  visible = jnp.arange(time)[None] <= positions[:, None]
  visible = jnp.broadcast_to(visible, (q.shape[0], *visible.shape))
  return attend(q, *layer, visible)
