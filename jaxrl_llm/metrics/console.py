"""Console output: a live progress line, events and samples."""

import collections
import datetime
import itertools
import os
import statistics
import sys
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

import rich.console
import rich.progress
import rich.text

from jaxrl_llm.metrics.samples import Sample, sample_lines

# Short phases, which a log does not announce.
_QUIET = ("", "between phases", "data", "wait", "sync")
# Shorter compilations are not mentioned in a log.
_LONG_COMPILATION_S = 5.0
# Label, metric and format; metrics that a run does not log are not shown.
_FIELDS = (
  ("reward", "reward/mean", ".3f"),
  ("accuracy", "reward/accuracy", ".3f"),
  ("entropy", "policy/entropy", ".3f"),
  ("length", "rollout/response_length_mean", ".1f"),
  ("ev", "value/explained_variance", ".2f"),
  ("tokens/s", "perf/tokens_per_second", ",.0f"),
)
_LOSS = ("loss", "policy/loss", ".3f")


def printable(text: str, *, encoding: str = "utf-8") -> str:
  """Escapes text that could control a terminal.

  Args:
    text: any string; may have control characters or lone surrogates.
    encoding: encoding of the terminal.

  Returns:
    The text with unsafe and unencodable characters as backslash escapes.
  """
  # Non-printable characters can move the cursor or disguise the text that
  # follows (bidirectional overrides); spaces of other widths are harmless.
  safe = "".join(
    c
    if c.isprintable() or unicodedata.category(c) == "Zs"
    else c.encode("unicode_escape").decode()
    for c in text
  )
  return safe.encode(encoding, "backslashreplace").decode(encoding)


class Bar(rich.progress.Progress):
  """A progress bar with text, on terminals that can redraw it.

  Attributes:
    disable: True if the stream is not such a terminal; lines are written
      instead.
  """

  def __init__(self, total: int, stream: TextIO, clock: Callable[[], float]):
    live = stream.isatty() and os.environ.get("TERM") not in (None, "dumb")
    super().__init__(
      rich.progress.BarColumn(28),
      rich.progress.TextColumn("{task.description}", markup=False),
      rich.progress.TimeElapsedColumn(),
      console=rich.console.Console(
        file=stream, force_terminal=live, force_jupyter=False
      ),
      get_time=clock,
      disable=not live,
    )
    self._task = self.add_task("", total=total)

  def show(self, done: int, text: str) -> None:
    """Redraws the bar with the given progress and text."""
    self.update(self._task, completed=done, description=text)

  def write(self, text: str) -> None:
    """Writes a line, above the bar if there is one."""
    # Text objects, unlike strings, are never read as markup.
    safe = rich.text.Text(printable(text, encoding=self.console.encoding))
    self.console.print(safe, soft_wrap=True)


class ConsoleWriter:
  """Shows the progress of a run: a live bar, or else one line per step."""

  def __init__(
    self,
    *,
    total_steps: int,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the display.

    Args:
      total_steps: last step of the run.
      stream: output stream; standard output if None.
      clock: returns seconds; only differences matter.
    """
    self._total, self._clock = total_steps, clock
    self._step, self._row, self._phase = 0, {}, ""
    self._begun, self._program = set(), ""
    self._ends = collections.deque(maxlen=52)
    self._bar = Bar(total_steps, stream or sys.stdout, clock)
    self._bar.start()

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    self._step, self._row = step, metrics
    self._ends.append(self._clock())
    self.phase(self._phase)
    if self._bar.disable:
      self.event("  ".join(self._parts()))
    for results in _evaluations(metrics):
      self.event(f"evaluation at step {step}: {results}")

  def samples(self, step: int, samples: Sequence[Sample]) -> None:
    self.event(f"samples of step {step}")
    for line in sample_lines(samples):
      self.event(line)

  def event(self, text: str) -> None:
    self._bar.write(text)

  def phase(self, name: str) -> None:
    """Shows the phase; without a bar, only its first occurrence, as a line."""
    self._phase = name
    if self._bar.disable and name not in {*self._begun, *_QUIET}:
      self.event(f"{name} ...")
    self._begun.add(name)
    self._show()

  def compiling(self, program: str) -> None:
    """Shows that a program is being compiled."""
    self._program = program
    self._show()

  def compiled(self, program: str, seconds: float) -> None:
    """Records the end of a compilation; without a bar, reports long ones."""
    self._program = ""
    if self._bar.disable and seconds >= _LONG_COMPILATION_S:
      self.event(f"compiled {program} in {seconds:.0f} s")
    self._show()

  def _show(self) -> None:
    compiling = f", compiling {self._program}" if self._program else ""
    doing = f"{self._phase}{compiling}"
    self._bar.show(self._step, "\n".join([*self._parts(), doing]))

  def close(self) -> None:
    self.phase("")
    self._bar.stop()

  def _parts(self) -> list[str]:
    """Returns the non-empty parts of the progress line."""
    parts = (
      f"step {self._step}/{self._total}",
      _headline(self._row),
      _health(self._row),
      f"left {self._left()}",
      _phases(self._row),
    )
    return [part for part in parts if part]

  def _left(self) -> str:
    """Estimates the time left from the median step, robust to compilation."""
    times = [after - before for before, after in itertools.pairwise(self._ends)]
    steps = max(self._total - self._step, 0)
    return duration(steps * statistics.median(times) if times else None)


def _headline(metrics: Mapping[str, float]) -> str:
  # A policy loss is meaningful only without rewards, as in SFT.
  fields = _FIELDS if "reward/mean" in metrics else (_LOSS, *_FIELDS)
  return "  ".join(
    f"{label} {float(metrics[name]):{form}}"
    for label, name, form in fields
    if name in metrics
  )


def _health(metrics: Mapping[str, float]) -> str:
  """Returns the active warnings of this step, including quiet ones."""
  names = [name for name in metrics if name.startswith("health/")]
  rules = [name.removeprefix("health/").replace("_", " ") for name in names]
  return f"health: {', '.join(rules)}" if rules else ""


def _phases(metrics: Mapping[str, float]) -> str:
  """Returns the step time and the times of its phases, in order."""
  names = [name for name in metrics if name.startswith("time/")]
  names.sort(key=lambda name: name != "time/step_s")
  return "  ".join(
    f"{name.removeprefix('time/').removesuffix('_s')} {metrics[name]:.2f}s"
    for name in names
  )


def _evaluations(metrics: Mapping[str, float]) -> list[str]:
  """Returns the results of each evaluation set."""
  sets = collections.defaultdict(list)
  for name, value in metrics.items():
    if name.startswith("eval/") and not name.endswith("_se"):
      result = f"{name.removeprefix('eval/')} {float(value):.3f}"
      if f"{name}_se" in metrics:
        result += f" (se {float(metrics[f'{name}_se']):.3f})"
      sets[name.rpartition("/")[0]].append(result)
  return [", ".join(results) for results in sets.values()]


def duration(seconds: float | None) -> str:
  """Formats hours, minutes and seconds; '?' if unknown."""
  if seconds is None:
    return "?"
  return str(datetime.timedelta(seconds=round(seconds)))
