"""Reads the folder of a run, which may still be running."""

import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import metrics
from jaxrl_llm.data.rows import read_object
from jaxrl_llm.errors import InputError, as_input_error


class Run(NamedTuple):
  """The logged rows of a run, and its files."""

  name: str
  rows: list[dict[str, Any]]  # Metrics, one dict per step.
  config: dict[str, Any]  # By dotted keys; empty without a config.json.
  samples: pathlib.Path | None = None  # samples.jsonl, which may be large.

  @property
  def title(self) -> str:
    """Name, method, model and seed, as far as they are known."""
    model = pathlib.Path(self.config.get("model.path") or "base model").name
    parts = [self.config.get("run.method"), model]
    parts.append(f"seed {self.config.get('run.seed')}")
    shown = ", ".join(filter(None, parts))
    return f"{self.name}: {shown}" if self.config else self.name


def load_run(path: str | os.PathLike) -> Run:
  """Reads the folder of a run.

  Args:
    path: folder with `metrics.jsonl`.

  Returns:
    The rows, the current settings and the file of samples.

  Raises:
    InputError: A file cannot be read or is empty, or one of its lines is
      damaged.
  """
  folder = pathlib.Path(path)
  file = folder / "metrics.jsonl"
  with as_input_error(f"{file}: cannot be read", "give a run", OSError):
    rows = metrics.read_rows(file)
  if not rows:
    raise InputError(f"{file}: no step was logged yet")
  config, samples = {}, folder / "samples.jsonl"
  changes = folder / "config_changes.jsonl"
  if (folder / "config.json").exists():
    config = flatten(read_object(folder / "config.json", "restore it"))
  what = f"{changes}: 'changes' must map keys to [old, new]"
  kinds = KeyError, TypeError, ValueError, AttributeError
  with as_input_error(what, "restore it", *kinds):
    for row in metrics.read_rows(changes) if changes.exists() else ():
      config |= {key: new for key, (_, new) in row["changes"].items()}
  samples = samples if samples.exists() else None
  return Run(folder.resolve().name, rows, config, samples)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens nested settings; the keys are joined with dots."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, dict) and value:
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[prefix + key] = value
  return flat


def have_a_mean(runs: Sequence[Run]) -> bool:
  """Whether there are several runs that differ only in their seeds."""
  configs = [run.config | {"run.seed": None} for run in runs]
  return len(runs) > 1 and all(config == configs[0] for config in configs)


def series(run: Run, metric: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns steps [K] and values [K] where a metric was logged and finite."""
  logged = [row for row in run.rows if row.get(metric) is not None]
  points = [(row["step"], row[metric]) for row in logged]
  steps, values = np.array(points, np.float64).reshape(-1, 2).T
  return steps, values


_UNJUDGED = "/unjudged_fraction"  # Of the responses of an evaluation.


def accuracy_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
  """Returns the names of evaluation accuracies: avg@k, greedy of each set."""
  names = dict.fromkeys(name for row in rows for name in row)
  return [n for n in names if re.fullmatch(r"eval/.*/(avg@\d+|greedy)", n)]


def reached(run: Run) -> str:
  """Summarizes the first and the last evaluation of a run in one line.

  Has accuracies with the standard error of the last one, or the mean reward if
  the run was not evaluated, and the responses on which the reward failed.
  Responses without a verdict count as incorrect in accuracies.
  """
  parts, span = [], ""
  for name in accuracy_names(run.rows) or ["reward/mean"]:
    steps, values = series(run, name)
    if steps.size:
      errors = dict(zip(*series(run, f"{name}_se")))
      error = f" ± {errors[steps[-1]]:.3f}" if steps[-1] in errors else ""
      label = name.removeprefix("eval/").replace("/", " ")
      parts.append(f"{label} {values[0]:.3f} → {values[-1]:.3f}{error}")
      span = f" (steps {steps[0]:.0f} and {steps[-1]:.0f})"
  _, errors = series(run, "reward/errors")
  if errors.any():
    span += f"; the reward failed on {errors.sum():,.0f} responses in"
    span += f" {np.count_nonzero(errors)} steps"
  lost = [
    row[name] for row in run.rows for name in row if name.endswith(_UNJUDGED)
  ]
  if any(lost):
    span += f"; in evaluations up to {max(lost):.0%} had no verdict"
  return ", ".join(parts) + span
