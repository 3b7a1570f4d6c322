"""Shape buckets: sizes are rounded up, so that few programs are compiled."""

import itertools
from collections.abc import Iterable

_MIN_LENGTH = 16  # The smallest length bucket.
_MIN_SLOTS = 8  # Slots per shard; fewer save no time.
_SLOT_RATIO = 4  # Ratio of consecutive slot buckets.


def length_buckets(max_length: int) -> list[int]:
  """Returns the padded lengths of contexts: 16, 24, 32, 48, ..., max_length."""
  powers = (_MIN_LENGTH << i for i in itertools.count())
  steps = (size for power in powers for size in (power, power * 3 // 2))
  below = itertools.takewhile(lambda size: size < max_length, steps)
  return [*dict.fromkeys(below), max_length]


def slot_buckets(slots: int, shards: int) -> list[int]:
  """Returns the decode batch sizes: all slots, a quarter, a sixteenth, ..."""
  shard_slots, sizes = slots // shards, []
  while not sizes or shard_slots >= _MIN_SLOTS:
    sizes.append(shard_slots * shards)
    shard_slots //= _SLOT_RATIO
  return sizes


def round_up(size: int, buckets: Iterable[int]) -> int:
  """Returns the smallest bucket of at least `size`."""
  return min(bucket for bucket in buckets if bucket >= size)
