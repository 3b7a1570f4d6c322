"""The allocator of KV cache pages, on the host.

The cache lies in pages of `page_size` tokens. A response gets pages as it grows
and gives them back, so memory follows the sum of lengths instead of slots ×
longest. Responses that begin alike may share a page: it is free again when its
last reader has given it back. On D shards a response has its pages on one.
"""

import heapq
from collections.abc import Sequence

import numpy as np

_MIN_PAGE_SIZE, _MAX_PAGE_SIZE = 32, 128


def default_page_size(max_length: int) -> int:
  """Tokens per page for sequences of up to `max_length`.

  Larger pages are read faster, smaller ones waste less at a sequence's end: a
  power of two, at most a sixteenth of the longest.
  """
  part = max(max_length // 16, 1)
  power = 1 << (part.bit_length() - 1)
  return int(np.clip(power, _MIN_PAGE_SIZE, _MAX_PAGE_SIZE))


class PageAllocator:
  """P pages on each of D shards, numbered within their shard.

  A page is in use, or free, or kept: it holds a context that nobody is writing
  on, and is free as soon as somebody needs it.
  """

  def __init__(self, *, shards: int, pages: int):
    """All pages are free."""
    # Heaps: the lowest pages first, so that those in use lie close together.
    self._free = [list(range(pages)) for _ in range(shards)]
    self._readers = np.zeros((shards, pages), np.int32)
    # (shard, pages) by context, the oldest first.
    self._kept: dict[bytes, tuple[int, list[int]]] = {}

  def allocate(self, shard: int, count: int) -> list[int] | None:
    """Pages whose only reader is the caller; None if there are too few."""
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
    """Pages in use get one more reader."""
    self._readers[shard, pages] += 1

  def free(self, shard: int, pages: Sequence[int]) -> None:
    """A reader gives pages back."""
    self._readers[shard, pages] -= 1
    for page in pages:
      if not self._readers[shard, page]:
        heapq.heappush(self._free[shard], page)

  def move(self, shard: int, pages: list[int], limit: int) -> list[tuple]:
    """Exchanges pages of one reader for free ones below `limit`.

    Args:
      shard: where they are.
      pages: changed in place, as far as there are free ones.
      limit: pages from this one on are to be left.

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
    """A reader gives the pages of a context back, in case that it goes on."""
    if context in self._kept:  # Somebody else had the same tokens.
      self.free(self._kept[context][0], self.take(context))
    self._kept[context] = shard, pages

  def shard_of(self, context: bytes) -> int | None:
    """Returns the shard that caches a context, or None."""
    return self._kept[context][0] if context in self._kept else None

  def take(self, context: bytes) -> list[int]:
    """The pages of a kept context, whose reader is the caller from now on."""
    return self._kept.pop(context)[1]
