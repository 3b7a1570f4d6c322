"""Paged attention in plain XLA: every page is multiplied where it lies."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.attention import MASKED, fold_heads
from jaxrl_llm.models.kv_cache import BlockTables, page_and_offset

# A layer's pages are in several arrays, so that only the first of them need be
# read while those hold all pages in use: k / 16 of the pages for each k here.
_PREFIXES = (1, 2, 3, 4, 6, 8, 12, 16)
_MIN_SEGMENT = 32  # Pages.

# Keys [D, p, K, d, page_size] and values [D, p, K, page_size, d] of p pages.
Segment = tuple[jax.Array, jax.Array]
PagedLayer = tuple[Segment, ...]  # Its P pages in order.


def segment_sizes(pages: int) -> list[int]:
  """Pages of each segment of a layer, P in all."""
  ends = [0]
  for part in _PREFIXES:
    end = pages * part // _PREFIXES[-1]
    if part == _PREFIXES[-1] or _MIN_SEGMENT <= end - ends[-1] <= pages - end:
      ends.append(end)
  return np.diff(ends).tolist()


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
  where pages lie. Segments after the last page in use are not read.

  Args:
    q: [S, Q, H, d].
    layer: of D shards of P pages, each with one owner.
    block_tables: the pages of each slot.
    positions: int32 [S, Q]; a query sees its own position and those before.

  Returns:
    [S, Q, H, d] in the dtype of q; scores and softmax are float32. 0 for a
    slot without pages.
  """
  shards, pages = block_tables.page_owner.shape
  share = len(q) // shards
  q, unfold = fold_heads(q * q.shape[3] ** -0.5, layer[0][0].shape[2])
  by_shard = lambda x: x.reshape(shards, share, *x.shape[1:])
  queries = by_shard(q), by_shard(positions)
  tables = block_tables[1:]  # By page.
  ends = np.cumsum(_sizes(layer))

  def read(count):
    """Attention on the pages of the first segments."""
    first = [x[:, : ends[count - 1]] for x in tables]
    return lambda: jax.vmap(_attend)(*queries, *first, layer[:count])

  used = jnp.any(block_tables.page_owner < share, axis=0)
  pages_read = jnp.max(jnp.where(used, 1 + jnp.arange(pages), 0))
  out = jax.lax.switch(
    jnp.sum(pages_read > ends[:-1]),
    [read(count) for count in range(1, 1 + len(layer))],
  )
  return unfold(out.reshape(-1, *out.shape[2:]))


def _attend(q, positions, owner, start, order, segments):
  """Attention of the S / D slots of a shard on its first p pages.

  Args:
    q: [S / D, K, G·Q, d].
    positions: [S / D, Q].
    owner: [p], as in `BlockTables`.
    start: [p].
    order: [p].
    segments: keys and values of the p pages.
  """
  share = len(q)
  by_segment = lambda x: jnp.split(x, np.cumsum(sizes)[:-1])
  sizes = [len(keys) for keys, _ in segments]
  owners, starts = by_segment(owner), by_segment(start)
  keys, values = zip(*segments)

  def of_slots(reduce, parts):
    """Over the pages of each slot, in the order of its blocks."""
    return reduce(jnp.concatenate(parts)[order], owner[order], share)

  score = functools.partial(_score_pages, q, positions)
  scores, tops = zip(*map(score, owners, starts, keys))
  top = of_slots(jax.ops.segment_max, tops)
  mix = functools.partial(_mix_pages, top)
  totals, outs = zip(*map(mix, owners, scores, values))
  total = of_slots(jax.ops.segment_sum, totals)
  out = of_slots(jax.ops.segment_sum, outs)
  return (out / jnp.where(total > 0, total, 1.0)[..., None]).astype(q.dtype)


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
  scores = jnp.where(visible[:, None, None], scores, MASKED).reshape(shape)
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
