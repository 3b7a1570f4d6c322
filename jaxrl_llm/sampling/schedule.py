"""What happens between two windows of decoding: small pure decisions.

The engine asks its schedule at every look: which responses get a slot, whether
to go on, which are given up or branched. A schedule knows counts, lengths and
groups; it knows neither the model nor the reward, and the engine does not know
why a schedule decides as it does.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import numpy as np

_REFILL_SHARE = 8  # Slots are refilled when one in so many is idle.


class View(NamedTuple):
  """What a schedule sees; B responses, by row."""

  slots: int
  waiting: chex.Array  # bool [B], will get a slot.
  active: chex.Array  # bool [B], has one.
  ended: chex.Array  # bool [B], finished, overlong or stopped.
  lengths: chex.Array  # int32 [B].
  groups: chex.Array  # int32 [B].

  @property
  def idle(self) -> int:
    """Slots without a response."""
    return self.slots - int(np.sum(self.active))


class Decision(NamedTuple):
  """What the engine does before the next window."""

  admit: int = 0  # Waiting responses that get a slot, in order of rows.
  halt: bool = False  # Nothing more is written: the rest is cut.
  stop: Sequence[int] = ()  # Rows that are given up and leave their slot.
  # (row, sample_id): a new response with the row's tokens so far.
  fork: Sequence[tuple[int, int]] = ()


Schedule = Callable[[View], Decision]


def refill(view: View) -> Decision:
  """Continuous batching: a slot that is free takes the next response.

  A few at a time: a prefill of many contexts costs little more than one.
  """
  waiting = int(np.sum(view.waiting))
  worth = view.idle >= max(1, view.slots // _REFILL_SHARE)
  last = waiting <= view.idle
  return Decision(admit=view.idle if worth or last else 0)


def first_groups(wanted: int, *, awaited: Sequence[int] = ()) -> Schedule:
  """Over-provisioning: go on until so many groups have ended whole.

  What is unfinished then is cut and can go on later, so no token is lost.

  Args:
    wanted: N groups; more than those are being written.
    awaited: rows that must have ended too, because they are old.

  Reference:
    Zhou et al. 2025, APRIL: active partial rollouts, arXiv 2509.18521.
  """
  awaited = np.asarray(awaited, int)

  def decide(view: View) -> Decision:
    done = complete(view.ended, view.groups)
    if np.sum(done) >= wanted and np.all(view.ended[awaited]):
      return Decision(halt=True)
    return refill(view)

  return decide


def complete(ended: chex.Array, groups: chex.Array) -> np.ndarray:
  """bool [number of groups]: every response of the group has ended."""
  size = np.bincount(groups)
  return (size > 0) & (np.bincount(groups, ended) == size)
