"""Paged attention in plain XLA, which reads every page in place."""

from collections.abc import Callable, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm.models import kv_cache
from jaxrl_llm.models.attention import MASKED, fold_heads, in_reach
from jaxrl_llm.models.kv_cache import BlockTables
from jaxrl_llm.models.numerics import einsum

# A layer's pages are split into several arrays, so that a call reads only the
# arrays up to its last page. They end at k / 16 of the pages, for each k.
_PREFIXES = (1, 2, 4, 8, 12, 16)
_MIN_SEGMENT = 32  # Pages.

# Keys [D, p, K, d, page_size] and values [D, p, K, page_size, d] of p pages.
Segment = tuple[Array, Array]
PagedLayer = tuple[Segment, ...]  # P pages in order.


def segment_sizes(pages: int) -> list[int]:
  """Returns the number of pages of each segment of a layer with P pages."""
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
  """Writes keys and values of Q new tokens per slot into its pages.

  Args:
    layer: a layer with D shards of at least P pages.
    k: [S, Q, K, d].
    v: [S, Q, K, d].
    block_tables: the pages of each slot, among the first P.
    positions: int32 [S, Q].
    writing: bool [S, Q]; tokens where it is False are not written.
  """
  shards, pages = block_tables.page_owner.shape
  page, offset = kv_cache.page_and_offset(
    block_tables.page_indices, positions, writing, pages, layer[0][0].shape[-1]
  )
  by_shard = lambda x: x.reshape(shards, -1, *x.shape[2:])
  offset, k, v = map(by_shard, (offset, k, v))

  @jax.vmap
  def write(
    keys: Array, values: Array, page: Array, offset: Array, k: Array, v: Array
  ):
    k, v = k.astype(keys.dtype), v.astype(values.dtype)
    keys = keys.at[page, :, :, offset].set(k, mode="drop")
    return keys, values.at[page, :, offset].set(v, mode="drop")

  def write_segment(segment: Segment, page: Array):
    return write(*segment, by_shard(page), offset, k, v)

  written = kv_cache.by_segment(write_segment, _first_pages(layer, pages), page)
  return (*written, *layer[len(written) :])


def _first_pages(layer: PagedLayer, pages: int) -> PagedLayer:
  """Returns the segments of the first `pages` pages."""
  return layer[: 1 + kv_cache.page_buckets((layer,)).index(pages)]


def paged_attention(
  q: chex.Array,
  layer: PagedLayer,
  block_tables: BlockTables,
  positions: chex.Array,
  *,
  window: int | None = None,
) -> Array:
  """Computes attention of Q queries per slot to the pages of that slot.

  Every page is multiplied in place by the queries of its owner, and the partial
  softmax sums of a slot are added in the order of its blocks. Nothing is
  gathered, and the result depends neither on other slots nor on page numbers.
  Pages outside the block tables are not read.

  Args:
    q: [S, Q, H, d].
    layer: a layer with D shards of at least P pages, each with one owner.
    block_tables: the pages of each slot, as in `write_paged`.
    positions: int32 [S, Q]; a query attends to its own and earlier positions.
    window: number of these positions; None: all.

  Returns:
    [S, Q, H, d] in the dtype of q, 0 for slots without pages; scores and
    softmax are float32.
  """
  shards, pages = block_tables.page_owner.shape
  q, unfold = fold_heads(q * q.shape[3] ** -0.5, layer[0][0].shape[2])
  by_shard = lambda x: x.reshape(shards, -1, *x.shape[1:])

  @jax.vmap
  def of_shard(q: Array, positions: Array, segments: PagedLayer, *table: Array):
    """Attends from [S / D, K, G·Q, d]; only products are by segment.

    This keeps the program small.
    """
    owner, start, order = table  # By page.
    slots, (keys, values) = len(q), zip(*segments)
    cuts = np.cumsum([len(x) for x in keys])[:-1]

    def multiply(equation: str, left: Array, right: Sequence[Array]):
      parts = zip(jnp.split(left, cuts), right)
      return jnp.concatenate([einsum(equation, *part) for part in parts])

    def over_pages(reduce: Callable[..., Array], x: Array):
      """Reduces over the pages of each slot, in the order of its blocks."""
      return reduce(x[order], owner[order], slots)

    held = jnp.minimum(owner, slots - 1)
    scores = multiply("pkqd,pkdl->pkql", q[held], keys)
    index = start[:, None] + jnp.arange(scores.shape[3])[None]
    # [P, Q, page_size].
    visible = in_reach(index[:, None], positions[held][:, :, None], window)
    visible &= (owner < slots)[:, None, None]
    by_query = scores.reshape(*scores.shape[:2], -1, *visible.shape[1:])
    by_query = jnp.where(visible[:, None, None], by_query, MASKED)
    scores = by_query.reshape(scores.shape)
    top = over_pages(jax.ops.segment_max, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - top[held][..., None])
    total = over_pages(jax.ops.segment_sum, jnp.sum(weights, axis=-1))
    mixed = multiply("pkql,pkld->pkqd", weights.astype(values[0].dtype), values)
    out = over_pages(jax.ops.segment_sum, mixed)
    return (out / jnp.where(total > 0, total, 1.0)[..., None]).astype(q.dtype)

  arrays = by_shard(q), by_shard(positions), _first_pages(layer, pages)
  out = of_shard(*arrays, *block_tables[1:])
  return unfold(out.reshape(-1, *out.shape[2:]))
