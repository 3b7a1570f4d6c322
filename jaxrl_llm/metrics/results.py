"""Summarizes the results of a run from its rows of metrics."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Rows = Sequence[Mapping[str, Any]]  # One per step.
_UNJUDGED = "/unjudged_fraction"  # Of the responses of an evaluation.


def series(rows: Rows, metric: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns steps [K] and values [K] where a metric was logged and finite."""
  logged = [row for row in rows if row.get(metric) is not None]
  points = [(row["step"], row[metric]) for row in logged]
  steps, values = np.array(points, np.float64).reshape(-1, 2).T
  return steps, values


def accuracy_names(rows: Rows) -> list[str]:
  """Returns the names of evaluation accuracies: avg@k, greedy of each set."""
  names = dict.fromkeys(name for row in rows for name in row)
  return [n for n in names if re.fullmatch(r"eval/.*/(avg@\d+|greedy)", n)]


def reached(rows: Rows) -> str:
  """Summarizes the first and the last evaluation of a run in one line.

  Has accuracies with the standard error of the last one, or the mean reward if
  the run was not evaluated, and the responses on which the reward failed.
  Responses without a verdict count as incorrect in accuracies.
  """
  parts, span = [], ""
  for name in accuracy_names(rows) or ["reward/mean"]:
    steps, values = series(rows, name)
    if steps.size:
      errors = dict(zip(*series(rows, f"{name}_se")))
      error = f" ± {errors[steps[-1]]:.3f}" if steps[-1] in errors else ""
      label = name.removeprefix("eval/").replace("/", " ")
      parts.append(f"{label} {values[0]:.3f} → {values[-1]:.3f}{error}")
      span = f" (steps {steps[0]:.0f} and {steps[-1]:.0f})"
  _, errors = series(rows, "reward/errors")
  if errors.any():
    span += f"; the reward failed on {errors.sum():,.0f} responses in"
    span += f" {np.count_nonzero(errors)} steps"
  lost = [row[name] for row in rows for name in row if name.endswith(_UNJUDGED)]
  if any(lost):
    span += f"; in evaluations up to {max(lost):.0%} had no verdict"
  return ", ".join(parts) + span
