"""Sizes that shapes come from: few, so that programs are few."""

import itertools


def ladder(first: int, last: int) -> list[int]:
  """first, 1.5 first, 2 first, 3 first, ... below `last`, then `last`."""
  powers = (first << i for i in itertools.count())
  steps = (size for power in powers for size in (power, power * 3 // 2))
  below = itertools.takewhile(lambda size: size < last, steps)
  return [*dict.fromkeys(below), last]
