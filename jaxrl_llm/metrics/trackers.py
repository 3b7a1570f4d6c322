"""Trackers: programs that draw a run's curves beside `metrics.jsonl`.

One is a context manager, made with (workdir, *, last_step, settings), that
gives a function of (step, metrics) to log with; it stands in `TRACKERS`.
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
  """Scalars as TensorBoard events in WORKDIR/tensorboard.

  A resumed run adds a file, and of older files TensorBoard forgets what comes
  after the step that is resumed.
  """
  # Imported here: it is slow to load and only the main process writes.
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
  """A run of Weights & Biases or of trackio, which has the same functions.

  A resume goes on with the run, which takes nothing back: of steps that are
  logged twice the values may stay that came first.
  """
  # A folder whose run begins anew is another run, and has a new config.json.
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
