"""Whether guessing pays: decided by what was measured, never by a result.

Responses are the same with guesses and without, so the decision may follow the
clock and still leave a run what it is.
"""

import collections

_KEPT = 5  # Newest measurements that count.


class Toggle:
  """Chooses guesses per step by the tokens per second of either way.

  How well guessing does depends on how many slots are active: few leave the
  device idle, many fill it. So counts are told apart by powers of two.
  """

  def __init__(self, drafts: int, *, retry: int = 32):
    """Knows nothing yet.

    Args:
      drafts: guesses per step when they pay; 0 is never.
      retry: choices after which the slower way is tried again.
    """
    self._drafts = drafts
    self._retry = retry
    self._seen = collections.defaultdict(int)
    self._rates = {}  # (bucket, drafts) -> newest rates.

  def choose(self, active: int) -> int:
    """Guesses per step for so many active slots."""
    if not self._drafts:
      return 0
    ways = (self._drafts, 0)
    bucket = _bucket(active)
    for way in ways:
      if self.rate(active, way) is None:
        return way
    fast, slow = sorted(ways, key=lambda way: -self.rate(active, way))
    self._seen[bucket] += 1
    return slow if self._seen[bucket] % self._retry == 0 else fast

  def observe(
    self, active: int, drafts: int, tokens: int, seconds: float
  ) -> None:
    """Takes note of a window; the first one of a kind compiled and is left."""
    key = (_bucket(active), drafts)
    if key not in self._rates:
      self._rates[key] = collections.deque(maxlen=_KEPT)
      return
    self._rates[key].append(tokens / max(seconds, 1e-9))

  def rate(self, active: int, drafts: int) -> float | None:
    """Median tokens per second as measured; None if it was not."""
    rates = sorted(self._rates.get((_bucket(active), drafts), ()))
    return rates[len(rates) // 2] if rates else None


def _bucket(active: int) -> int:
  return max(active, 1).bit_length()
