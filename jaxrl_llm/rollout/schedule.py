"""Rollout schedules: when a sampler call stops, and which groups count."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxrl_llm import sampling
from jaxrl_llm.errors import TrainingStopped
from jaxrl_llm.types import Pruning


class Stop(NamedTuple):
  """Scheduling rules that end a sampler call."""

  # (groups still missing, rows that must end) -> rule, which halts only when
  # these groups and rows have ended.
  groups: Callable[[int, np.ndarray], sampling.rules.SchedulingRule]
  # (responses of a batch) -> rule, for responses sampled in windows.
  responses: Callable[[int], sampling.rules.SchedulingRule]


# Name -> when to stop. With any but 'all', unfinished responses continue in the
# next call.
STOPS: dict[str, Stop] = {
  "all": Stop(
    groups=lambda wanted, awaited: sampling.continuous_batching,
    responses=lambda count: sampling.continuous_batching,
  ),
  "first_groups": Stop(
    groups=sampling.stop_after_groups,
    responses=sampling.stop_after_responses,
  ),
}


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
  """The schedule of a worker; sizes are in groups of `group_size`.

  Attributes:
    groups: groups of a batch.
    group_size: responses per group.
    in_flight: groups sampled at a time, at least `groups`.
    stop: when a sampler call stops, one of `STOPS`.
    dynamic_sampling: whether only groups with correct and incorrect responses
      count.
    window: maximum number of new tokens per response and step; 0 sets no limit.
      With a window, a batch is every response with new tokens, ended or not,
      and every dropped response.
    max_staleness: maximum number of updates between the oldest and the newest
      token of a batch.
    max_rounds: maximum number of calls before dynamic sampling stops the run.
    pruning: drops unfinished responses; None drops none.
  """

  groups: int
  group_size: int
  in_flight: int
  stop: str = "all"
  dynamic_sampling: bool = False
  window: int = 0
  max_staleness: int = 1
  max_rounds: int = 1
  pruning: Pruning | None = None

  def __post_init__(self):
    if self.stop != "all" and not self.window and self.patience < 1:
      raise ValueError(
        f"max_staleness={self.max_staleness} is too small for"
        f" {self.in_flight} groups in flight and {self.groups} per batch: use"
        f" {1 + self.max_staleness - self.patience} or more"
      )

  @property
  def patience(self) -> int:
    """Age, in updates, at which an unfinished response must be finished.

    Below `max_staleness` if so many groups are in flight that the last ones are
    trained on some updates later.
    """
    later = -(-self.in_flight // self.groups) - 2 + self.dynamic_sampling
    return self.max_staleness - max(0, later)


def too_few(
  settings: RolloutSettings, rounds: int, judged: int, passed: int
) -> TrainingStopped:
  """Returns the error for dynamic sampling that found too few groups."""
  return TrainingStopped(
    f"{rounds} rounds judged {judged} groups, but only {passed} of the"
    f" {settings.groups} needed have correct and incorrect responses: the data"
    " are too easy or too hard; change them, raise schedule.over_provision or"
    " schedule.max_rounds, or set schedule.dynamic_sampling=False"
  )
