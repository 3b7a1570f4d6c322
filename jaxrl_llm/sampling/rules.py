"""Scheduling rules: what the engine does between two decode calls.

At every scheduler step the engine asks its rule how many responses get a slot,
and whether to go on. A rule is a small pure function of counts, lengths and
groups; it knows neither the model nor the reward, and the engine does not know
why it decides as it does. (A *schedule* is something else: that of rollouts and
updates in a run, `config.schedule`.)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import numpy as np

REFILL_SHARE = 8  # A prefill is worth it when one slot in so many is free.


class SchedulerView(NamedTuple):
  """The view of a scheduling rule; B responses, by row of the rollout."""

  slots: int
  waiting: chex.Array  # bool [B], will get a slot.
  active: chex.Array  # bool [B], has one.
  asked: chex.Array  # bool [B], left its slot for what an environment says.
  ended: chex.Array  # bool [B], finished or overlong.
  lengths: chex.Array  # int32 [B].
  groups: chex.Array  # int32 [B].

  @property
  def free(self) -> int:
    """Slots without a response."""
    return self.slots - int(np.sum(self.active))


class Decision(NamedTuple):
  """The actions of the engine before the next decode call."""

  insert: int = 0  # Waiting responses that get a slot, in order of rows.
  halt: bool = False  # Nothing more is written: the rest is cut.


SchedulingRule = Callable[[SchedulerView], Decision]


def continuous_batching(view: SchedulerView) -> Decision:
  """A slot that is free takes the next response."""
  return Decision(refill(view.slots, view.free, int(np.sum(view.waiting))))


def refill(slots: int, free: int, waiting: int) -> int:
  """Returns how many free slots to fill now.

  A few at a time: a prefill of many contexts costs little more than one.
  """
  worth_it = free >= max(1, slots // REFILL_SHARE)
  return free if worth_it or waiting <= free else 0


def stop_after_groups(
  count: int, *, awaited: Sequence[int] = ()
) -> SchedulingRule:
  """Over-provisioning: continuous batching until so many groups have ended.

  What is unfinished then is cut and can go on later, so no token is lost.

  Args:
    count: N groups; more than those are being written.
    awaited: rows that must have ended too, because they are old.

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
  """bool [number of groups]: every response of the group has ended."""
  size = np.bincount(groups)
  return (size > 0) & (np.bincount(groups, ended) == size)


def stop_after_responses(count: int) -> SchedulingRule:
  """Continuous batching until so many responses have ended or paused.

  Args:
    count: responses; more than those are being written.
  """

  def rule(view: SchedulerView) -> Decision:
    if np.sum(~(view.waiting | view.active | view.asked)) >= count:
      return Decision(halt=True)
    return continuous_batching(view)

  return rule
