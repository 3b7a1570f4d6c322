"""The page allocator matches a naive model that tracks every reader."""

import numpy as np
import pytest

from jaxrl_llm.sampling import allocator as allocator_lib


def _used(readers, contexts):
  return {page for pages in (*readers, *contexts.values()) for page in pages}


class TestPageAllocator:
  @pytest.mark.parametrize("shards", [1, 3])
  def test_a_random_life_equals_the_naive_model(self, shards):
    rng = np.random.default_rng(0)
    allocator = allocator_lib.PageAllocator(shards=shards, pages=20)
    held = [[] for _ in range(shards)]  # Pages of each reader.
    kept = [{} for _ in range(shards)]  # By context, oldest first.
    for number in range(3000):
      shard, what = rng.integers(shards), rng.random()
      readers, contexts = held[shard], kept[shard]
      if what < 0.4:
        count = int(rng.integers(0, 6))
        pages = allocator.allocate(shard, count)
        while contexts and 20 - len(_used(readers, contexts)) < count:
          contexts.pop(next(iter(contexts)))
        if count > 20 - len(_used(readers, contexts)):
          assert pages is None
        else:
          assert len(set(pages)) == count and not _used(
            readers, contexts
          ) & set(pages)
          readers.append(pages)
      elif contexts and what < 0.5:
        context = list(contexts)[rng.integers(len(contexts))]
        assert allocator.shard_of(context) == shard
        assert allocator.take(context) == contexts[context]
        assert allocator.shard_of(context) is None
        readers.append(contexts.pop(context))
      elif not readers:
        continue
      elif what < 0.6:
        pages = readers[rng.integers(len(readers))]
        shared = pages[: rng.integers(0, len(pages) + 1)]
        allocator.share(shard, shared)
        readers.append(shared)
      else:
        pages = readers.pop(rng.integers(len(readers)))
        if what < 0.8:
          allocator.free(shard, pages)
        else:  # Some contexts are kept twice.
          context = bytes([shard, number % 5])
          allocator.keep(context, shard, pages)
          contexts.pop(context, None)
          contexts[context] = pages

  def test_pages_move_to_the_front_as_far_as_those_there_are_free(self):
    allocator = allocator_lib.PageAllocator(shards=2, pages=8)
    first, pages = allocator.allocate(1, 4), allocator.allocate(1, 3)
    allocator.free(1, first[:2])
    assert allocator.move(1, pages, 4) == [(1, 4, 0), (1, 5, 1)]
    assert pages == [0, 1, 6]
    assert allocator.move(1, pages, 4) == []
    assert allocator.allocate(1, 3) == [4, 5, 7]
    allocator.free(1, pages)
    assert allocator.allocate(1, 3) == [0, 1, 6]


class TestDefaultPageSize:
  @pytest.mark.parametrize(
    "max_length, expected",
    [(1, 32), (32, 32), (512, 32), (1023, 32), (1024, 64), (1200, 64)]
    + [(2048, 128), (40_000, 128)],
  )
  def test_is_a_power_of_two_of_a_sixteenth(self, max_length, expected):
    assert allocator_lib.default_page_size(max_length) == expected
