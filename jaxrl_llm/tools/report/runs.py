"""Reads the folder of a run, which may still be running."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
