"""Experiment trackers, in addition to `metrics.jsonl`.

A tracker in `TRACKERS` is a context manager with arguments (workdir, *,
last_step, settings) that yields a function of (step, metrics).
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import InputError

Log = Callable[[int, Mapping[str, float]], None]


@contextlib.contextmanager
def tensorboard(workdir: pathlib.Path, *, last_step: int, **_) -> Iterator[Log]:
  """Writes scalars as TensorBoard events to WORKDIR/tensorboard.

  A resumed run adds a file, and TensorBoard then drops the later steps of older
  files.
  """
  # Imported here: it is slow to import, and only the main process writes.
  import tensorboardX

  with tensorboardX.SummaryWriter(
    str(workdir / "tensorboard"),
    purge_step=last_step + 1,
    # Two runs within one second must not share a file.
    filename_suffix=f".{time.time_ns()}",
  ) as writer:

    def log(step: int, metrics: Mapping[str, float]) -> None:
      for name, value in metrics.items():
        writer.add_scalar(name, value, step)
      writer.flush()

    yield log


@contextlib.contextmanager
def tracked_run(
  package: str, workdir: pathlib.Path, *, settings: Mapping[str, Any], **_
) -> Iterator[Log]:
  """Logs to Weights & Biases, or to trackio, which has the same interface.

  A resumed run continues the tracked run. Steps that are logged twice may keep
  their first values.
  """
  # A run that starts over in the same folder has a new config.json, and is
  # tracked as a new run.
  begun = int((workdir / "config.json").stat().st_mtime)
  name = f"{workdir.resolve().name}-{begun}"
  options = {"id": name, "dir": str(workdir)} if package == "wandb" else {}
  module = importlib.import_module(package)
  module.init(
    project=os.environ.get(f"{package.upper()}_PROJECT", "jaxrl_llm"),
    name=name,
    config=dict(settings),
    resume="allow",
    **options,
  )
  try:
    yield lambda step, metrics: module.log(dict(metrics), step=step)
  finally:
    module.finish()


TRACKERS = {
  "tensorboard": tensorboard,
  "wandb": functools.partial(tracked_run, "wandb"),
  "trackio": functools.partial(tracked_run, "trackio"),
}


def check_trackers(names: Sequence[str]) -> None:
  """Checks that the packages of trackers are installed.

  Raises:
    InputError: A package is missing.
  """
  for name in names:  # TensorBoard's is always installed.
    if name != "tensorboard" and importlib.util.find_spec(name) is None:
      raise InputError(
        f"config.run.trackers has {name!r}, which is not installed: pip install"
        f" 'jaxrl_llm[{name}]'"
      )
