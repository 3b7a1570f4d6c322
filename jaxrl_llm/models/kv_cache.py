"""The paged KV cache of the sampler, for any layout of a layer's arrays.

A layer has D shards of P pages of `page_size` tokens. Its pages are split into
one or more segments. A segment of p pages is a tree of arrays [D, p, ...],
whose layout is chosen by the attention backend. A contiguous layer, the result
of prefill, is a similar tree of arrays [N, ...] with N sequences of T tokens. A
page and a sequence differ in one axis only, of size page_size or T.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

KVCache = tuple[Any, ...]  # Layers: a tuple of segments, or contiguous.


class BlockTables(NamedTuple):
  """Maps the tokens of S slots to pages of a KV cache with D shards of P pages.

  P is one of `page_buckets`: a shard may have more pages, which programs with
  these tables neither read nor write.

  A sequence is cut into blocks of `page_size` tokens, one per page. Each shard
  has S / D consecutive slots, and page numbers are local to their shard.
  `page_indices` is the block table of vLLM. The other arrays are its inverse,
  for attention that visits pages in place.
  """

  page_indices: chex.Array  # int32 [S, N], page of each block; P: none.
  page_owner: chex.Array  # int32 [D, P], slot within the shard; S / D: none.
  page_start: chex.Array  # int32 [D, P], position of the page's first token.
  page_order: chex.Array  # int32 [D, P], pages sorted by page_start.


def make_block_tables(
  page_indices: np.ndarray, *, shards: int, pages: int, page_size: int
) -> BlockTables:
  """Makes block tables on the host, with shapes determined by the arguments.

  Args:
    page_indices: int32 [S, N].
    shards: number of shards, D.
    pages: number of pages in use per shard, P.
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


def page_buckets(kv_cache: KVCache) -> list[int]:
  """Returns the cumulative number of pages after each segment."""
  sizes = [jax.tree.leaves(segment)[0].shape[1] for segment in kv_cache[0]]
  return np.cumsum(sizes).tolist()


def page_and_offset(
  page_indices: chex.Array,
  positions: chex.Array,
  writing: chex.Array,
  pages: int,
  page_size: int,
) -> tuple[Array, Array]:
  """Returns the page of each token (P if it is not written) and its offset.

  Args:
    page_indices: int32 [S, N], as in `BlockTables`.
    positions: int32 [S, Q], positions of the tokens in their sequences.
    writing: bool [S, Q], whether the token is written.
    pages: pages per shard, P.
    page_size: tokens per page.
  """
  block = positions // page_size
  page = jnp.take_along_axis(page_indices, block, axis=1, mode="clip")
  # A draft token may lie beyond the longest sequence.
  page = jnp.where(writing & (block < page_indices.shape[1]), page, pages)
  return page, positions % page_size


def write_tokens(
  layer: chex.Array,
  new: chex.Array,
  page_indices: chex.Array,
  positions: chex.Array,
  writing: chex.Array,
) -> Array:
  """Writes Q new tokens per slot into pages that store tokens contiguously.

  Args:
    layer: [D, P, page_size, ...].
    new: [S, Q, ...], in the dtype of the layer.
    page_indices: int32 [S, N], as in `BlockTables`.
    positions: int32 [S, Q].
    writing: bool [S, Q], tokens to write; others leave the layer as is.
  """
  shards, pages, page_size = layer.shape[:3]
  page, offset = page_and_offset(
    page_indices, positions, writing, pages, page_size
  )
  by_shard = lambda x: x.reshape(shards, -1, *x.shape[2:])
  write = lambda layer, page, offset, new: layer.at[page, offset].set(
    new, mode="drop"
  )
  return jax.vmap(write)(layer, *map(by_shard, (page, offset, new)))


def write_pages(
  kv_cache: KVCache, prefilled: KVCache, pages: chex.Array
) -> KVCache:
  """Copies prefilled sequences into pages.

  Args:
    kv_cache: paged, D shards of P pages.
    prefilled: contiguous, N sequences of T tokens.
    pages: int32 [N, D, ⌈T / page_size⌉], the page of each block on each shard;
      P drops the block.
  """
  pages = pages.swapaxes(0, 1)
  count, blocks = pages.shape[1:]

  def write(paged: Array, contiguous: Array, index: Array):
    axis = _token_axis(paged, contiguous)
    page_size = paged.shape[1 + axis]
    padding = [(0, 0)] * contiguous.ndim
    padding[axis] = (0, blocks * page_size - contiguous.shape[axis])
    new = jnp.pad(contiguous, padding).astype(paged.dtype)
    split = (*new.shape[:axis], blocks, page_size, *new.shape[axis + 1 :])
    new = jnp.moveaxis(new.reshape(split), axis, 1)  # [N, blocks, ...].
    new = new.reshape(count * blocks, *new.shape[2:])
    put = lambda x, i: x.at[i.reshape(-1)].set(new, mode="drop")
    return jax.vmap(put)(paged, index)

  def write_layer(layer: Any, new: Any):
    write_segment = lambda segment, index: jax.tree.map(
      lambda x, y: write(x, y, index), segment, new
    )
    return by_segment(write_segment, layer, pages)

  return tuple(map(write_layer, kv_cache, prefilled))


def copy_pages(
  kv_cache: KVCache, sources: chex.Array, targets: chex.Array
) -> KVCache:
  """Copies pages within their shards.

  Args:
    kv_cache: paged, D shards of P pages.
    sources: int32 [D, n], in [0, P).
    targets: int32 [D, n]; P drops the copy.
  """

  @jax.vmap
  def take(segment: Any, i: Array):
    get = lambda x: x.at[i].get(mode="fill", fill_value=0)
    return jax.tree.map(get, segment)

  @jax.vmap
  def put(segment: Any, i: Array, new: Any):
    put = lambda x, new: x.at[i].set(new, mode="drop")
    return jax.tree.map(put, segment, new)

  def copy_layer(layer: Any):
    # Each page is in one segment; the others contribute zeros.
    parts = by_segment(take, layer, sources)
    pages = jax.tree.map(lambda *x: sum(x[1:], x[0]), *parts)
    return by_segment(lambda *to: put(*to, pages), layer, targets)

  return tuple(map(copy_layer, kv_cache))


def by_segment(function: Callable[..., Any], layer: Any, pages: Array):
  """Calls function(segment, page numbers within it) for each segment.

  Pages of other segments have an out-of-range number, the segment's size.
  """
  first, results = 0, []
  for segment in layer:
    size = jax.tree.leaves(segment)[0].shape[1]
    here = (pages >= first) & (pages < first + size)
    results.append(function(segment, jnp.where(here, pages - first, size)))
    first += size
  return tuple(results)


def _token_axis(paged: Array, contiguous: Array):
  """Returns the token axis of a contiguous array.

  If T = page_size, a sequence is one page, and any axis will do.
  """
  sizes = zip(paged.shape[2:], contiguous.shape[1:], strict=True)
  different = [i for i, (page, row) in enumerate(sizes, 1) if page != row]
  (axis,) = different or [1]
  return axis
