"""The paged KV cache of the sampler, whatever a layer's arrays look like.

The keys and values of a layer are a tree of arrays, whose layout is that of the
attention kernels. A paged array is [D, P, ...]: D shards of P pages of
`page_size` tokens. A contiguous one, as prefill makes it, is [N, ...]: N
sequences of T tokens. A page and a sequence differ in one axis, page_size and
T, and are alike in all others.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

KVCache = tuple[Any, ...]  # One tree of arrays a layer.


def write_pages(
  kv_cache: KVCache, prefilled: KVCache, pages: chex.Array
) -> KVCache:
  """Copies prefilled sequences into pages, each G times.

  Args:
    kv_cache: paged, D shards of P pages.
    prefilled: contiguous, N sequences of T tokens.
    pages: int32 [N, G, ⌈T / page_size⌉], the page of each block, numbered
      through all shards; D · P drops a block.
  """
  blocks = pages.shape[2]

  def write(paged, contiguous):
    axis = _token_axis(paged, contiguous)
    page_size = paged.shape[1 + axis]
    padding = [(0, 0)] * contiguous.ndim
    padding[axis] = (0, blocks * page_size - contiguous.shape[axis])
    new = jnp.pad(contiguous, padding).astype(paged.dtype)
    split = (*new.shape[:axis], blocks, page_size, *new.shape[axis + 1 :])
    new = jnp.moveaxis(new.reshape(split), axis, 1)  # [N, blocks, ...].
    new = jnp.repeat(new[:, None], pages.shape[1], axis=1)
    flat = paged.reshape(-1, *paged.shape[2:])
    flat = flat.at[pages.reshape(-1)].set(
      new.reshape(-1, *new.shape[3:]), mode="drop"
    )
    return flat.reshape(paged.shape)

  return jax.tree.map(write, kv_cache, prefilled)


def copy_pages(
  kv_cache: KVCache, sources: chex.Array, targets: chex.Array
) -> KVCache:
  """Copies pages within their shards.

  Args:
    kv_cache: paged, D shards of P pages.
    sources: int32 [D, n], in [0, P).
    targets: int32 [D, n]; P drops a copy.
  """
  copy = jax.vmap(lambda x, old, new: x.at[new].set(x[old], mode="drop"))
  return jax.tree.map(lambda x: copy(x, sources, targets), kv_cache)


def _token_axis(paged, contiguous):
  """The axis of a contiguous array in which it differs from a page.

  With T = page_size a sequence is a page, and cutting it along any axis leaves
  it whole.
  """
  sizes = zip(paged.shape[2:], contiguous.shape[1:], strict=True)
  different = [i for i, (page, row) in enumerate(sizes, 1) if page != row]
  (axis,) = different or [1]
  return axis
