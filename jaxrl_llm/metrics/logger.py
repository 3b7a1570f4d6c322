"""Logs one row per step to files, trackers and the console."""

import contextlib
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from jaxrl_llm.metrics.console import ConsoleWriter
from jaxrl_llm.metrics.measure import watch_compilations
from jaxrl_llm.metrics.outlets import Background, Outlet
from jaxrl_llm.metrics.samples import Sample
from jaxrl_llm.metrics.trackers import TRACKERS
from jaxrl_llm.metrics.watchdog import Watchdog
from jaxrl_llm.metrics.writers import JsonlWriter, NullWriter, number
from jaxrl_llm.system import streams

_PHASES = ("time/", "host/")
_SHOWN = 4  # Number of responses shown on the console.


class PhaseLogger(contextlib.ExitStack):
  """Logger of processes other than the first: logs only phase times.

  Attributes:
    more: returns additional metrics of a step; none by default.
    watchdog: watches the phases.
  """

  more: Callable[[], dict[str, float]] = dict

  def __init__(
    self,
    times: str | os.PathLike = "",
    *,
    role: str = "",
    stuck_after_s: float = 0.0,
  ):
    """Watches the phases.

    Args:
      times: new JSONL file for the phase times of this process; '' for none.
      role: role of this process, written to each line of that file.
      stuck_after_s: time limit of a phase, see `Watchdog`.
    """
    super().__init__()
    self.watchdog, self._logs = Watchdog(), []
    self.enter_context(self.watchdog.watching(stuck_after_s))
    if times:
      file = JsonlWriter(times)
      self.callback(file.close)
      of_phases = lambda row: {k: row[k] for k in row if k.startswith(_PHASES)}
      write = lambda step, row: file.log(step, of_phases(row), role=role)
      self._logs.append(Outlet(str(times), write, self.event))

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    """Logs the metrics of a step, each a single number."""
    metrics = {name: number(name, value) for name, value in metrics.items()}
    for log in self._logs:
      log(step, metrics)

  def samples(self, step: int, samples: Sequence[Sample]) -> None:
    """Does nothing: the first process logs samples."""

  def event(self, text: str) -> None:
    """Does nothing: the first process logs events."""

  def rows(self, path: str | os.PathLike) -> Any:
    """Returns a writer that writes nothing."""
    return NullWriter()

  def phase(self, name: str) -> None:
    """Records that a phase of the step begins."""
    self.watchdog.enter(name)


class MetricsLogger(PhaseLogger):
  """Logs to the files of a run, its trackers and the console.

  A context manager: on exit, every writer is closed, even if closing another
  one fails. Results of an evaluation are additional keys of the step's row:
  `eval/SET/avg@k`, `eval/SET/avg@k_se`, `eval/SET/pass@k`.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    total_steps: int,
    last_step: int,
    tracked_by: Sequence[str] = ("tensorboard",),
    settings: Mapping[str, Any] = {},
    stream: TextIO | None = None,
    **watched: Any,
  ):
    """Opens files, trackers and console.

    Args:
      workdir: directory of `metrics.jsonl` and `samples.jsonl`.
      total_steps: last step of the run.
      last_step: step of the checkpoint to resume from; -1 for none. Rows of
        later steps are dropped.
      tracked_by: keys of `trackers.TRACKERS`.
      settings: settings of the run, for trackers that show them.
      stream: output stream of the console; standard output if None.
      **watched: times and stuck_after_s, as in `PhaseLogger`.
    """
    super().__init__(**watched)
    workdir = pathlib.Path(workdir)
    opened = lambda name: self._opened(workdir / name, last_step)
    self._logs.append(opened("metrics.jsonl").log)
    console = ConsoleWriter(total_steps=total_steps, stream=stream)
    self._console = Outlet(
      "console",
      lambda method, *args: getattr(console, method)(*args),
      lambda line: print(line, file=sys.stderr),
    )
    self.callback(self._console, "close")
    # Tried again with every step, as long as it fails.
    samples = functools.cache(lambda: opened("samples.jsonl"))
    append = lambda rows: samples().append(rows)
    self._samples = Outlet("samples.jsonl", append, self.event)
    self._samples([])
    outlets = [self._console, self._samples]
    self.callback(self._report, outlets)
    for name in tracked_by:
      made = TRACKERS[name](workdir, last_step=last_step, settings=settings)
      tracker = Background(name, made, self.event)
      self._logs.append(tracker)
      outlets.append(tracker)
      self.callback(tracker.close)
    of_console = functools.partial(functools.partial, self._console)
    self.callback(
      watch_compilations(of_console("compiling"), of_console("compiled"))
    )
    self._logs.append(of_console("log"))

  def samples(self, step: int, samples: Sequence[Sample]) -> None:
    """Logs responses of a step; the console shows the first few."""
    self._samples([sample.row(step) for sample in samples])
    self._console("samples", step, samples[:_SHOWN])

  def _opened(self, path: pathlib.Path, last_step: int) -> JsonlWriter:
    file = JsonlWriter(path)
    file.truncate_after(last_step)
    self.callback(file.close)
    return file

  def _report(self, outlets: Sequence[Outlet]) -> None:
    """Counts what was not written, as the last line."""
    lost = [line for outlet in outlets for line in outlet.losses()]
    if lost := [*lost, *streams.losses()]:
      self.event(f"not written: {'; '.join(lost)}")
      if streams.losses():  # Perhaps the line, too.
        print(f"not written: {'; '.join(lost)}", file=sys.stderr)

  def event(self, text: str) -> None:
    """Shows a line on the console."""
    self._console("event", text)

  def rows(self, path: str | os.PathLike) -> JsonlWriter:
    """Opens another file of rows."""
    return JsonlWriter(path)

  def phase(self, name: str) -> None:
    """Records and shows that a phase of the step begins."""
    self._console("phase", name)
    super().phase(name)
