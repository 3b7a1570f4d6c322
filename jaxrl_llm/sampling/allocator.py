"""The allocator of KV cache pages, on the host.

The cache is divided into pages of `page_size` tokens. A response allocates
pages as it grows and frees them when it ends, so memory is proportional to the
sum of lengths instead of slots × longest. Responses with a common prefix may
share a page, which is reference-counted. With D shards, all pages of a response
are on the same shard.
"""

import heapq
from collections.abc import Sequence

import numpy as np

_MIN_PAGE_SIZE, _MAX_PAGE_SIZE = 32, 128


def default_page_size(max_length: int) -> int:
  """Returns the default page size for sequences of up to `max_length` tokens.

  Larger pages are read faster, smaller ones waste less at the end of a
  sequence. The default is a power of two, at most a sixteenth of `max_length`.
  """
  part = max(max_length // 16, 1)
  power = 1 << (part.bit_length() - 1)
  return int(np.clip(power, _MIN_PAGE_SIZE, _MAX_PAGE_SIZE))


class PageAllocator:
  """Allocates P pages on each of D shards, numbered within their shard.

  A page is free, in use, or cached: it holds the context of a response outside
  of the slots, and is evicted when its space is needed.
  """

  def __init__(self, *, shards: int, pages: int):
    """Makes an allocator whose pages are all free."""
    # Heaps: the lowest pages first, so that pages in use are close together.
    self._free = [list(range(pages)) for _ in range(shards)]
    self._readers = np.zeros((shards, pages), np.int32)
    # Cached contexts -> (shard, pages), oldest first.
    self._kept: dict[bytes, tuple[int, list[int]]] = {}

  def allocate(self, shard: int, count: int) -> list[int] | None:
    """Allocates pages, evicting cached ones; None if there are too few."""
    free = self._free[shard]
    for context in [k for k, kept in self._kept.items() if kept[0] == shard]:
      if len(free) >= count:
        break
      self.free(shard, self.take(context))
    if len(free) < count:
      return None
    pages = [heapq.heappop(free) for _ in range(count)]
    self._readers[shard, pages] = 1
    return pages

  def share(self, shard: int, pages: Sequence[int]) -> None:
    """Adds a reader to pages in use."""
    self._readers[shard, pages] += 1

  def free(self, shard: int, pages: Sequence[int]) -> None:
    """Removes a reader from pages; those without readers become free."""
    self._readers[shard, pages] -= 1
    for page in pages:
      if not self._readers[shard, page]:
        heapq.heappush(self._free[shard], page)

  def move(self, shard: int, pages: list[int], limit: int) -> list[tuple]:
    """Exchanges unshared pages for free ones below `limit`.

    Args:
      shard: shard of the pages.
      pages: updated in place, for as long as there are free pages.
      limit: pages at or above this number are moved.

    Returns:
      (shard, from, to) of each page that moved.
    """
    free, moved = self._free[shard], []
    for i, page in enumerate(pages):
      if page >= limit and free and free[0] < limit:
        pages[i] = heapq.heapreplace(free, page)
        self._readers[shard, [page, pages[i]]] = 0, 1
        moved.append((shard, page, pages[i]))
    return moved

  def keep(self, context: bytes, shard: int, pages: list[int]) -> None:
    """Caches the pages of a context, in case it continues."""
    if context in self._kept:  # Another response had the same tokens.
      self.free(self._kept[context][0], self.take(context))
    self._kept[context] = shard, pages

  def shard_of(self, context: bytes) -> int | None:
    """Returns the shard that caches a context, or None."""
    return self._kept[context][0] if context in self._kept else None

  def take(self, context: bytes) -> list[int]:
    """Uncaches a context and returns its pages, now read by the caller."""
    return self._kept.pop(context)[1]
