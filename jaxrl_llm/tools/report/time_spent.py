"""Wall-clock time of a run by phase."""

from collections.abc import Mapping, Sequence
from typing import Any

# Phases of the sampler, which may run concurrently with the learner; a phase
# `wait` of the learner then exists.
_SAMPLER = ("data", "generate", "reward")
_LEARNER = ("score", "update_value", "update_policy")
# Phases that training needs; everything else is overhead.
_PRODUCTIVE = (*_SAMPLER, "wait", *_LEARNER, "sync")

MEANING = (
  "start: loading, value pretraining and restoring; other: in a step but in"
  " none of its phases; lost: between a stop and the next start, and steps that"
  " a kill discarded and that were repeated; goodput: the fraction of all time"
  " spent on rollouts, rewards, scores, updates and syncs."
)


def seconds_spent(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Splits the time from a run's first start to its last row.

  Args:
    rows: rows of metrics.jsonl, ascending; the run may have been resumed.

  Returns:
    Seconds by phase of `time/*_s`, and by the categories of `MEANING`; their
    sum is the elapsed time.
  """
  spent = {"start": 0.0, "other": 0.0, "lost": 0.0}
  previous = None
  for row in rows:
    phases = {
      name.removeprefix("time/").removesuffix("_s"): value
      for name, value in row.items()
      if name.startswith("time/")
    }
    start, step = phases.pop("start", 0.0), phases.pop("step", 0.0)
    if sum(phases.values()) > step:  # Sampler and learner ran concurrently.
      phases = {k: v for k, v in phases.items() if k not in _SAMPLER}
    for name, value in phases.items():
      spent[name] = spent.get(name, 0.0) + value
    spent["start"] += start
    spent["other"] += step - sum(phases.values())
    now = row.get("time")
    if previous is not None and now is not None:
      lost = now - previous - start - step
      # Below -1 s it is not rounding: the clock was set back.
      spent["lost"] += lost if lost > -1.0 else 0.0
    previous = now
  return spent


def goodput(rows: Sequence[Mapping[str, Any]]) -> float:
  """Returns the productive fraction of the time, see `MEANING`."""
  spent = seconds_spent(rows)
  productive = sum(spent.get(name, 0.0) for name in _PRODUCTIVE)
  return productive / max(sum(spent.values()), 1e-9)
