"""Experiment trackers, in addition to `metrics.jsonl`.

A tracker in `TRACKERS` is a context manager with arguments (workdir, *,
last_step, settings) that yields a function of (step, metrics). It runs in a
thread of its own, and the run goes on if it fails or hangs.
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
  from tensorboardX import event_file_writer, summary
  from tensorboardX.proto import event_pb2

  folder = workdir / "tensorboard"
  folder.mkdir(exist_ok=True)
  # Not `SummaryWriter`: its thread reports no errors. Two runs within one
  # second must not share a file.
  writer = event_file_writer.EventsWriter(
    str(folder / "events"), f".{time.time_ns()}"
  )

  def write(step: int, **content: Any) -> None:
    event = event_pb2.Event(wall_time=time.time(), step=step, **content)
    writer.write_event(event)

  def log(step: int, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
      write(step, summary=summary.scalar(name, value))
    writer.flush()

  starts = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
  write(last_step + 1, session_log=starts)
  with contextlib.closing(writer):
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
