"""Wall-clock time of a run by phase."""

from collections.abc import Mapping, Sequence
from typing import Any

# Phases of a sampler that may run concurrently; the learner then has `wait`.
_SAMPLER = ("data", "generate", "reward")
_LEARNER = ("score", "update_value", "update_policy")
# Phases that training needs; everything else is overhead.
_PRODUCTIVE = (*_SAMPLER, "wait", *_LEARNER, "sync")

MEANING = (
  "start: loading, value pretraining and restoring; other: in a step but in no"
  " phase of it; lost: between a stop and the next start, and steps that a kill"
  " took and that were done again; goodput: the fraction of all seconds that"
  " rollouts, rewards, scores, updates and syncs took."
)


def seconds_spent(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Splits the time from a run's first start to its last row.

  Args:
    rows: rows of metrics.jsonl, ascending; resumes may lie between them.

  Returns:
    Seconds by what they were spent on; they sum to the time that passed:
    the phases of `time/*_s`, and what `MEANING` says.
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
    if sum(phases.values()) > step:  # Both worked at the same time.
      phases = {k: v for k, v in phases.items() if k not in _SAMPLER}
    for name, value in phases.items():
      spent[name] = spent.get(name, 0.0) + value
    spent["start"] += start
    spent["other"] += step - sum(phases.values())
    now = row.get("time")
    if previous is not None and now is not None:
      lost = now - previous - start - step
      # Less than nothing by more than rounding: the clock was set back.
      spent["lost"] += lost if lost > -1.0 else 0.0
    previous = now
  return spent


def goodput(rows: Sequence[Mapping[str, Any]]) -> float:
  """Fraction of the time that trained, see `MEANING`."""
  spent = seconds_spent(rows)
  productive = sum(spent.get(name, 0.0) for name in _PRODUCTIVE)
  return productive / max(sum(spent.values()), 1e-9)
