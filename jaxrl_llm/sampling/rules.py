"""Scheduling rules: decisions between two decode calls.

At every scheduler step a rule decides how many responses get a slot, and
whether to continue. A rule is a small pure function of counts, lengths and
groups, independent of model and reward. (A *schedule* is something else: it
orders the rollouts and updates of a run, see `config.schedule`.)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import numpy as np


class SchedulerView(NamedTuple):
  """The input of a scheduling rule; B responses, by row of the rollout."""

  slots: int
  waiting: chex.Array  # bool [B], waits for a slot.
  active: chex.Array  # bool [B], has a slot.
  awaiting_environment: chex.Array  # bool [B], left its slot until the reply.
  ended: chex.Array  # bool [B], finished, overlong or dropped.
  lengths: chex.Array  # int32 [B].
  groups: chex.Array  # int32 [B].

  @property
  def free(self) -> int:
    """The number of free slots."""
    return self.slots - int(np.sum(self.active))


class Decision(NamedTuple):
  """The actions of the engine before the next decode call."""

  insert: int = 0  # Number of waiting responses to insert, in order of rows.
  halt: bool = False  # Stops the call: unfinished responses are cut.
  # Rows to drop before they end; they are excluded from losses and baselines.
  stop: Sequence[int] = ()


SchedulingRule = Callable[[SchedulerView], Decision]


def continuous_batching(view: SchedulerView) -> Decision:
  """Fills free slots with the next waiting responses."""
  return Decision(refill(view.slots, view.free, int(np.sum(view.waiting))))


def refill(slots: int, free: int, waiting: int) -> int:
  """Returns how many free slots to fill now.

  Waits until several are free: prefilling many contexts at once costs little
  more than prefilling one.
  """
  return free if free >= min_free(slots) or waiting <= free else 0


def min_free(slots: int) -> int:
  """Returns how many slots must be free for a refill: an eighth of them."""
  return max(1, slots // 8)


def stop_after_groups(
  count: int, awaited: Sequence[int] = ()
) -> SchedulingRule:
  """Makes a rule that stops when a number of groups have ended (APRIL).

  Until then it is `continuous_batching`. Unfinished responses are cut and can
  continue later; no token is lost.

  Args:
    count: number of groups; more are in flight.
    awaited: rows that must also have ended, because of their staleness.

  Reference:
    Zhou et al. 2025, APRIL: active partial rollouts, arXiv 2509.18521.
  """
  awaited = np.asarray(awaited, int)

  def rule(view: SchedulerView) -> Decision:
    done = complete(view.ended, view.groups)
    if np.sum(done) >= count and np.all(view.ended[awaited]):
      return Decision(halt=True)
    return continuous_batching(view)

  return rule


def complete(ended: chex.Array, groups: chex.Array) -> np.ndarray:
  """Returns groups whose responses have all ended, bool [number of groups]."""
  size = np.bincount(groups)
  return (size > 0) & (np.bincount(groups, ended) == size)


def stop_after_responses(count: int) -> SchedulingRule:
  """Makes a rule that stops when a number of responses have ended or paused.

  Until then it is `continuous_batching`.

  Args:
    count: number of responses; more are in flight.
  """

  def rule(view: SchedulerView) -> Decision:
    begun = view.waiting | view.active | view.awaiting_environment
    if np.sum(~begun) >= count:
      return Decision(halt=True)
    return continuous_batching(view)

  return rule
