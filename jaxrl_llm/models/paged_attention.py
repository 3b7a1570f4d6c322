"""Paged attention in plain XLA: every page is multiplied where it lies."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.attention import MASKED, fold_heads
from jaxrl_llm.models.kv_cache import BlockTables, page_and_offset

# A layer's pages are in several arrays, so that those without a page in use
# cost nothing: at most so many, and of at least so many pages.
_MAX_SEGMENTS, _MIN_SEGMENT = 8, 32

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
  q, unfold = fold_heads(q * q.shape[3] ** -0.5, layer[0][0].shape[2])
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
