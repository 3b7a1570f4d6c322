"""Reads the folder of a run, also while it is running."""

import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import metrics
from jaxrl_llm.data.rows import read_object
from jaxrl_llm.errors import InputError


class Run(NamedTuple):
  """The logged rows and samples of a run."""

  name: str
  rows: list[dict[str, Any]]  # Metrics, one object a step.
  config: dict[str, Any]  # By dotted keys; empty without a config.json.
  samples: list[dict[str, Any]]  # Samples of the last step with any.

  @property
  def title(self) -> str:
    """Name, method, model and seed, as far as the settings have them."""
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
    The rows, the current settings and the last samples.

  Raises:
    InputError: a file is empty or a line of it is damaged.
    OSError: `metrics.jsonl` is missing or cannot be read.
  """
  folder = pathlib.Path(path)
  rows = metrics.read_rows(folder / "metrics.jsonl")
  if not rows:
    raise InputError(f"{folder / 'metrics.jsonl'}: no step was logged yet")
  config, samples = {}, []
  if (folder / "config.json").exists():
    config = _flatten(read_object(folder / "config.json", "restore it"))
  if (folder / "config_changes.jsonl").exists():
    for row in metrics.read_rows(folder / "config_changes.jsonl"):
      config |= {key: new for key, (_, new) in row["changes"].items()}
  if (folder / "samples.jsonl").exists():
    samples = metrics.read_rows(folder / "samples.jsonl")
    samples = [s for s in samples if s["step"] == samples[-1]["step"]]
  return Run(folder.resolve().name, rows, config, samples)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  flat = {}
  for key, value in config.items():
    if isinstance(value, dict) and value:
      flat |= _flatten(value, f"{prefix}{key}.")
    else:
      flat[prefix + key] = value
  return flat


def have_a_mean(runs: Sequence[Run]) -> bool:
  """Whether there are several runs that differ in nothing but their seeds."""
  configs = [run.config | {"run.seed": None} for run in runs]
  return len(runs) > 1 and all(config == configs[0] for config in configs)


def series(run: Run, metric: str) -> tuple[np.ndarray, np.ndarray]:
  """Steps [K] and values [K] of a metric where it was logged and finite."""
  logged = [row for row in run.rows if row.get(metric) is not None]
  points = [(row["step"], row[metric]) for row in logged]
  steps, values = np.array(points, np.float64).reshape(-1, 2).T
  return steps, values


def accuracy_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
  """Names of accuracies of evaluations in rows: avg@k, greedy of every set."""
  names = dict.fromkeys(name for row in rows for name in row)
  return [n for n in names if re.fullmatch(r"eval/.*/(avg@\d+|greedy)", n)]
