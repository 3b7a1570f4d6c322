"""One row a step, to every place that shows or keeps it."""

import contextlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from jaxrl_llm.metrics.console import ConsoleWriter
from jaxrl_llm.metrics.samples import Sample
from jaxrl_llm.metrics.trackers import TRACKERS
from jaxrl_llm.metrics.watchdog import Watchdog
from jaxrl_llm.metrics.writers import JsonlWriter, NullWriter, number

_PHASES = ("time/", "host/")


class PhaseLogger(contextlib.ExitStack):
  """The logger of processes other than the first: times of phases only."""

  def __init__(
    self, times: str | os.PathLike = "", *, stuck_after_s: float = 0.0
  ):
    """Watches the phases.

    Args:
      times: a new JSONL file of how long this process takes for them; none if
        empty.
      stuck_after_s: seconds of a phase that end the process, see `Watchdog`.
    """
    super().__init__()
    self._watchdog, self._logs = Watchdog(), []
    self.enter_context(self._watchdog.watching(stuck_after_s))
    if times:
      file = JsonlWriter(times)
      self.callback(file.close)
      of_phases = lambda row: {k: row[k] for k in row if k.startswith(_PHASES)}
      self._logs.append(lambda step, row: file.log(step, of_phases(row)))

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    """Takes the metrics of one step, each of them one number."""
    metrics = {name: number(name, value) for name, value in metrics.items()}
    for log in self._logs:
      log(step, metrics)

  def samples(self, step: int, samples: Sequence[Sample]) -> None:
    """Leaves a few responses of one step to it."""

  def event(self, text: str) -> None:
    """Leaves a line to it."""

  def rows(self, path: str | os.PathLike) -> Any:
    """A file of rows that takes none."""
    del path
    return NullWriter()

  def phase(self, name: str) -> None:
    """Learns that a phase of the step begins."""
    self._watchdog.enter(name)


class MetricsLogger(PhaseLogger):
  """The files of a run, its trackers and the console; a context manager.

  Results of an evaluation are further keys of the step's row:
  `eval/SET/avg@k`, `eval/SET/avg@k_se`, `eval/SET/pass@k`. On leaving, every
  writer is closed, also when one of them fails to.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    total_steps: int,
    last_step: int,
    tracked_by: Sequence[str] = ("tensorboard",),
    settings: Mapping[str, Any] = {},
    times: str | os.PathLike = "",
    stuck_after_s: float = 0.0,
    stream: TextIO | None = None,
  ):
    """Opens them all.

    Args:
      workdir: gets `metrics.jsonl` and `samples.jsonl`.
      total_steps: the step at which the run is done.
      last_step: the step of the checkpoint that the run goes on from, -1 for
        none. Rows of later steps, left by a run that died, are dropped.
      tracked_by: names of `trackers.TRACKERS`.
      settings: settings of the run, for trackers that show them.
      times, stuck_after_s: as of `PhaseLogger`.
      stream: where to show progress; standard output if None.
    """
    super().__init__(times, stuck_after_s=stuck_after_s)
    workdir = pathlib.Path(workdir)
    rows, self._samples = (
      JsonlWriter(workdir / name) for name in ("metrics.jsonl", "samples.jsonl")
    )
    for file in (rows, self._samples):
      file.truncate_after(last_step)
      self.callback(file.close)
    tracked = [
      self.enter_context(
        TRACKERS[name](workdir, last_step=last_step, settings=settings)
      )
      for name in tracked_by
    ]
    self._console = ConsoleWriter(total_steps=total_steps, stream=stream)
    self.callback(self._console.close)
    self._logs += rows.log, *tracked, self._console.log

  def samples(self, step: int, samples: Sequence[Sample]) -> None:
    """Takes a few responses of one step."""
    self._samples.append([sample.row(step) for sample in samples])
    self._console.samples(step, samples)

  def event(self, text: str) -> None:
    """Shows a line to the person who watches."""
    self._console.event(text)

  def rows(self, path: str | os.PathLike) -> JsonlWriter:
    """A further file of rows."""
    return JsonlWriter(path)

  def phase(self, name: str) -> None:
    """Learns that a phase of the step begins."""
    self._console.phase(name)
    super().phase(name)
