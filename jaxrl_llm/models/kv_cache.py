"""The paged KV cache of the sampler, whatever a layer's arrays look like.

A layer has D shards of P pages of `page_size` tokens. Its pages are in one or
several segments, one after the other; a segment of p pages is a tree of arrays
[D, p, ...], whose layout is that of the attention kernels. A contiguous layer,
as prefill makes it, is a like tree of arrays [N, ...]: N sequences of T tokens.
A page and a sequence differ in one axis, page_size and T, and are alike in all
others.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

KVCache = tuple[Any, ...]  # A layer each: a tuple of segments, or contiguous.


class BlockTables(NamedTuple):
  """Which pages of a KV cache hold which tokens; D shards of P pages, S slots.

  P is one of `page_buckets`: a shard may have more pages, which a program that
  is given these tables neither reads nor writes.

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
    pages: P, the first ones of a shard.
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
  """Pages that whole segments have in all, from the first segment on."""
  sizes = [jax.tree.leaves(segment)[0].shape[1] for segment in kv_cache[0]]
  return np.cumsum(sizes).tolist()


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


def write_pages(
  kv_cache: KVCache, prefilled: KVCache, pages: chex.Array
) -> KVCache:
  """Copies prefilled sequences into pages.

  Args:
    kv_cache: paged, D shards of P pages.
    prefilled: contiguous, N sequences of T tokens.
    pages: int32 [N, D, ⌈T / page_size⌉], on each shard the page of each block;
      P drops a block.
  """
  pages = pages.swapaxes(0, 1)
  count, blocks = pages.shape[1:]

  def write(paged, contiguous, index):
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

  def write_layer(layer, new):
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
    targets: int32 [D, n]; P drops a copy.
  """

  @jax.vmap
  def take(segment, i):
    get = lambda x: x.at[i].get(mode="fill", fill_value=0)
    return jax.tree.map(get, segment)

  @jax.vmap
  def put(segment, i, new):
    put = lambda x, new: x.at[i].set(new, mode="drop")
    return jax.tree.map(put, segment, new)

  def copy_layer(layer):
    # A page is in one segment, and the others have given zeros.
    parts = by_segment(take, layer, sources)
    pages = jax.tree.map(lambda *x: sum(x[1:], x[0]), *parts)
    return by_segment(lambda *to: put(*to, pages), layer, targets)

  return tuple(map(copy_layer, kv_cache))


def by_segment(function, layer, pages):
  """The function of each segment and of the pages' numbers within it.

  Pages of other segments have its size for a number, which is nowhere.
  """
  first, results = 0, []
  for segment in layer:
    size = jax.tree.leaves(segment)[0].shape[1]
    here = (pages >= first) & (pages < first + size)
    results.append(function(segment, jnp.where(here, pages - first, size)))
    first += size
  return tuple(results)


def _token_axis(paged, contiguous):
  """The axis of a contiguous array in which it differs from a page.

  With T = page_size a sequence is a page, and cutting it along any axis leaves
  it whole.
  """
  sizes = zip(paged.shape[2:], contiguous.shape[1:], strict=True)
  different = [i for i, (page, row) in enumerate(sizes, 1) if page != row]
  (axis,) = different or [1]
  return axis
