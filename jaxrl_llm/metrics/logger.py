"""One row a step, to every place that shows or keeps it."""

import contextlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TextIO

from jaxrl_llm.metrics import console, writers


class MetricsLogger(writers.Writer):
  """Hands metrics, samples and events to several writers, in their order.

  Results of an evaluation are further keys of the step's row:
  `eval/SET/avg@k`, `eval/SET/avg@k_se`, `eval/SET/pass@k`. Use it as a context
  manager; without writers (any process but the first) it does nothing.
  """

  def __init__(self, members: Sequence[writers.Writer]):
    self._members = tuple(members)

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    for member in self._members:
      member.log(step, metrics)

  def samples(self, step: int, samples: Sequence[writers.Sample]) -> None:
    for member in self._members:
      member.samples(step, samples)

  def event(self, text: str) -> None:
    for member in self._members:
      member.event(text)

  def phase(self, name: str) -> None:
    for member in self._members:
      member.phase(name)

  def close(self) -> None:
    # Every writer is closed, also when one of them fails to.
    with contextlib.ExitStack() as stack:
      for member in self._members:
        stack.callback(member.close)
    self._members = ()

  def __enter__(self) -> "MetricsLogger":
    return self

  def __exit__(self, *_) -> None:
    self.close()


def make_logger(
  workdir: str | os.PathLike,
  *,
  total_steps: int,
  last_step: int,
  stream: TextIO | None = None,
) -> MetricsLogger:
  """Opens the files of a run and the console.

  Args:
    workdir: gets `metrics.jsonl`, `samples.jsonl` and `tensorboard/`.
    total_steps: the step at which the run is done.
    last_step: the step of the checkpoint that the run goes on from, -1 for
      none. Rows of later steps, left by a run that died, are dropped.
    stream: where to show progress; standard output if None.

  Returns:
    A logger that writes to all of them.
  """
  workdir = pathlib.Path(workdir)
  rows = writers.JsonlWriter(workdir / "metrics.jsonl")
  rows.truncate_after(last_step)
  samples = writers.SampleWriter(workdir / "samples.jsonl")
  samples.truncate_after(last_step)
  events = writers.TensorBoardWriter(
    workdir / "tensorboard", purge_step=last_step + 1
  )
  shown = console.ConsoleWriter(total_steps=total_steps, stream=stream)
  return MetricsLogger([rows, samples, events, shown])
