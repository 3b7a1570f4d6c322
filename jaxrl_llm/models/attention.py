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
# A layer's pages are in several arrays, so that those without a page in use
# cost nothing: at most so many, and of at least so many pages.
_MAX_SEGMENTS, _MIN_SEGMENT = 8, 32


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
  shard. `page_indices` is what vLLM calls the block table. The others say the
  same page by page, for attention that goes through pages where they lie.
  """

  page_indices: chex.Array  # int32 [S, N], page of each block; P for none.
  page_owner: chex.Array  # int32 [D, P], slot within the shard; S / D for none.
  page_start: chex.Array  # int32 [D, P], position of the page's first token.
  page_order: chex.Array  # int32 [D, P], all pages, first blocks first.


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
  owner = np.full((shards, pages), share, np.int32)
  start = np.full((shards, pages), width * page_size, np.int32)
  for shard, table in enumerate(page_indices.reshape(shards, share, width)):
    slot, block = np.nonzero(table < pages)
    page = table[slot, block]
    owner[shard, page], start[shard, page] = slot, block * page_size
  order = np.argsort(start, axis=1, kind="stable").astype(np.int32)
  return BlockTables(page_indices, owner, start, order)


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


# Keys [D, p, K, d, page_size] and values [D, p, K, page_size, d] of p pages.
Segment = tuple[jax.Array, jax.Array]
PagedLayer = tuple[Segment, ...]  # Its P pages in order.


def segment_sizes(pages: int) -> list[int]:
  """Pages of each segment of a layer, P in all."""
  count = int(np.clip(pages // _MIN_SEGMENT, 1, _MAX_SEGMENTS))
  return np.diff(np.arange(count + 1) * pages // count).tolist()


def write_paged(
  layer: PagedLayer,
  k: chex.Array,
  v: chex.Array,
  block_tables: BlockTables,
  positions: chex.Array,
  writing: chex.Array,
) -> PagedLayer:
  """Writes the keys and values of Q new tokens a slot into its pages.

  Args:
    layer: of D shards of P pages.
    k: [S, Q, K, d].
    v: [S, Q, K, d].
    block_tables: the pages of each slot.
    positions: int32 [S, Q].
    writing: bool [S, Q], the others leave no trace.
  """
  shards, pages = block_tables.page_owner.shape
  page, offset = page_and_offset(
    block_tables.page_indices, positions, writing, pages, layer[0][0].shape[-1]
  )
  by_shard = lambda x: x.reshape(shards, -1, *x.shape[2:])

  @jax.vmap
  def write(keys, values, page, offset, k, v):
    k, v = k.astype(keys.dtype), v.astype(values.dtype)
    keys = keys.at[page, :, :, offset].set(k, mode="drop")
    return keys, values.at[page, :, offset].set(v, mode="drop")

  first, written = 0, []
  for segment, size in zip(layer, _sizes(layer)):
    within = (page >= first) & (page < first + size)
    index = by_shard(jnp.where(within, page - first, size))
    written.append(write(*segment, index, *map(by_shard, (offset, k, v))))
    first += size
  return tuple(written)


def _sizes(layer: PagedLayer) -> list[int]:
  return [keys.shape[1] for keys, _ in layer]


def _split(x: jax.Array, sizes: list[int]) -> list[jax.Array]:
  """[D, P, ...] by segments."""
  return jnp.split(x, np.cumsum(sizes)[:-1], axis=1)


def paged_attention(
  q: chex.Array,
  layer: PagedLayer,
  block_tables: BlockTables,
  positions: chex.Array,
) -> jax.Array:
  """Attention of Q queries a slot on the pages of that slot.

  Every page is multiplied where it lies, by the queries of its owner, and the
  partial softmax sums of a slot are added in the order of its blocks: so
  nothing is gathered, and the result depends neither on the other slots nor on
  where pages lie. Segments without a page in use are left out.

  Args:
    q: [S, Q, H, d].
    layer: of D shards of P pages, each with one owner.
    block_tables: the pages of each slot.
    positions: int32 [S, Q]; a query sees its own position and those before.

  Returns:
    [S, Q, H, d] in the dtype of q; scores and softmax are float32. 0 for a
    slot without pages.
  """
  shards = len(block_tables.page_owner)
  share = len(q) // shards
  q, unfold = _fold(q * q.shape[3] ** -0.5, layer[0][0].shape[2])
  by_shard = lambda x: x.reshape(shards, share, *x.shape[1:])
  q, positions = by_shard(q), by_shard(positions)
  by_segment = functools.partial(_split, sizes=_sizes(layer))
  owner, order = block_tables.page_owner, block_tables.page_order
  owners, starts = by_segment(owner), by_segment(block_tables.page_start)
  keys, values = zip(*layer)

  def where_used(function, same, *parts):
    """The function of each segment; zeros for one without a page in use."""
    run = jax.vmap(function)
    results = []
    for owner, *part in zip(owners, *parts):
      arguments = (*same, owner, *part)
      zeros = lambda *x: jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(run, *x)
      )
      used = jnp.any(owner < share)
      results.append(jax.lax.cond(used, run, zeros, *arguments))
    return zip(*results)

  def of_slots(reduce, parts):
    """Over the pages of each slot, in the order of its blocks."""
    pages = jnp.concatenate(list(parts), axis=1)
    run = lambda x, owner, order: reduce(x[order], owner[order], share)
    return jax.vmap(run)(pages, owner, order)

  scores, tops = where_used(_score_pages, (q, positions), starts, keys)
  top = of_slots(jax.ops.segment_max, tops)
  totals, outs = where_used(_mix_pages, (top,), scores, values)
  total = of_slots(jax.ops.segment_sum, totals)
  out = of_slots(jax.ops.segment_sum, outs)
  out = out / jnp.where(total > 0, total, 1.0)[..., None]
  return unfold(out.reshape(-1, *out.shape[2:]).astype(q.dtype))


def _score_pages(q, positions, owner, start, keys):
  """Scores of p pages of a shard, and the largest of each page and query.

  Args:
    q: [S / D, K, G·Q, d].
    positions: [S / D, Q].
    owner: [p].
    start: [p].
    keys: [p, K, d, page_size].

  Returns:
    [p, K, G·Q, page_size] and [p, K, G·Q].
  """
  slots, kv_heads = q.shape[:2]
  held = jnp.minimum(owner, slots - 1)
  scores = jnp.einsum(
    "pkqd,pkdl->pkql", q[held], keys, preferred_element_type=jnp.float32
  )
  index = start[:, None] + jnp.arange(keys.shape[3])[None]
  visible = index[:, None] <= positions[held][:, :, None]  # [p, Q, page_size].
  visible &= (owner < slots)[:, None, None]
  shape = scores.shape
  scores = scores.reshape(shape[0], kv_heads, -1, *visible.shape[1:])
  scores = jnp.where(visible[:, None, None], scores, _MASKED).reshape(shape)
  return scores, jnp.max(scores, axis=-1)


def _mix_pages(top, owner, scores, values):
  """Softmax sums [p, K, G·Q] of pages, and their values mixed by weight.

  Args:
    top: [S / D, K, G·Q], the largest score of each query.
    owner: [p].
    scores: [p, K, G·Q, page_size].
    values: [p, K, page_size, d].
  """
  held = jnp.minimum(owner, len(top) - 1)
  weights = jnp.exp(scores - top[held][..., None])
  mixed = jnp.einsum(
    "pkql,pkld->pkqd",
    weights.astype(values.dtype),
    values,
    preferred_element_type=jnp.float32,
  )
  return jnp.sum(weights, axis=-1), mixed


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
