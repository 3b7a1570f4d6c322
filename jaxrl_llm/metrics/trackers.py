"""Trackers: programs that draw a run's curves beside `metrics.jsonl`.

One is made with (workdir, *, last_step, settings), has `log` and `close`, and
stands in `TRACKERS`.
"""

import functools
import importlib
import importlib.util
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.metrics.writers import number


class TensorBoardWriter:
  """Writes scalars as TensorBoard events into WORKDIR/tensorboard.

  A resumed run adds a file, and of older files TensorBoard forgets what comes
  after the step that is resumed.
  """

  def __init__(self, workdir: pathlib.Path, *, last_step: int, **_):
    """Opens a new event file; arguments as of `MetricsLogger`."""
    # Imported here: it is slow to load and only the main process writes.
    import tensorboardX

    self._writer = tensorboardX.SummaryWriter(
      str(workdir / "tensorboard"),
      purge_step=last_step + 1,
      # Two runs within one second must not share a file.
      filename_suffix=f".{time.time_ns()}",
    )

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
      self._writer.add_scalar(name, number(name, value), step)
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


class TrackedRun:
  """A run of Weights & Biases or of trackio, which has the same functions.

  A resume goes on with the run, which takes nothing back: of steps that are
  logged twice the values may stay that came first.
  """

  def __init__(
    self,
    package: str,
    workdir: pathlib.Path,
    *,
    settings: Mapping[str, Any],
    **_,
  ):
    """Opens the run; arguments as of `MetricsLogger`."""
    # A folder whose run begins anew is another run, and has a new config.json.
    begun = int((workdir / "config.json").stat().st_mtime)
    name = f"{workdir.resolve().name}-{begun}"
    options = {"id": name, "dir": str(workdir)} if package == "wandb" else {}
    self._package = importlib.import_module(package)
    self._package.init(
      project=os.environ.get(f"{package.upper()}_PROJECT", "jaxrl_llm"),
      name=name,
      config=dict(settings),
      resume="allow",
      **options,
    )

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    row = {name: number(name, value) for name, value in metrics.items()}
    self._package.log(row, step=step)

  def close(self) -> None:
    self._package.finish()


TRACKERS = {
  "tensorboard": TensorBoardWriter,
  "wandb": functools.partial(TrackedRun, "wandb"),
  "trackio": functools.partial(TrackedRun, "trackio"),
}


def check_trackers(names: Sequence[str]) -> None:
  """Looks for the packages of trackers, before any work.

  Raises:
    InputError: one is missing.
  """
  for name in names:  # TensorBoard's is always installed.
    if name != "tensorboard" and importlib.util.find_spec(name) is None:
      raise InputError(
        f"config.run.trackers has {name!r}, which is not installed: pip install"
        f" 'jaxrl_llm[{name}]'"
      )
