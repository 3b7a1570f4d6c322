"""How far a program is that writes responses and nothing else."""

import datetime
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

import rich.console
import rich.progress


class Progress:
  """Responses, tokens per second, time left: a bar on a terminal, else lines.

  A context manager; the bar is there as long as the context.
  """

  def __init__(
    self,
    total: int,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the clock.

    Args:
      total: responses that will be written.
      stream: where to show; standard error if None.
      clock: returns seconds; only differences matter.
    """
    self._stream = sys.stderr if stream is None else stream
    self._total = total
    self._clock = clock
    self._begun = clock()
    self.responses = self.tokens = 0  # Those that are kept.
    terminal = os.environ.get("TERM") not in (None, "dumb")
    self._bar = None
    if terminal and self._stream.isatty():
      self._bar = _make_bar(self._stream, total)

  def __enter__(self) -> "Progress":
    if self._bar is not None:
      self._bar.start()
    return self

  def __exit__(self, *_) -> None:
    if self._bar is not None:
      self._bar.stop()

  @property
  def seconds(self) -> float:
    """Since the start; never 0."""
    return max(self._clock() - self._begun, 1e-9)

  def look(self, responses: int, tokens: int) -> None:
    """Shows what is being written, beyond what is kept; a bar only."""
    if self._bar is not None:
      done = self.responses + responses
      rate = self._rate(done, self.tokens + tokens)
      self._bar.update(self._bar.task_ids[0], completed=done, rate=rate)

  def keep(self, responses: int, tokens: int) -> None:
    """Counts what was written for good, and shows it."""
    self.responses += responses
    self.tokens += tokens
    self.look(0, 0)
    if self._bar is None:
      done = f"{self.responses:,}/{self._total:,} responses"
      line = f"{done}  {self._rate(self.responses, self.tokens)}"
      print(line, file=self._stream, flush=True)

  def _rate(self, responses: int, tokens: int) -> str:
    left = "?"
    if responses:
      seconds = self.seconds / responses * (self._total - responses)
      left = str(datetime.timedelta(seconds=round(seconds)))
    return f"{tokens / self.seconds:,.0f} tokens/s  left {left}"


def _make_bar(stream: TextIO, total: int) -> rich.progress.Progress:
  bar = rich.progress.Progress(
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TextColumn("responses  {task.fields[rate]}"),
    console=rich.console.Console(file=stream, force_terminal=True),
  )
  bar.add_task("", total=total, rate="")
  return bar
