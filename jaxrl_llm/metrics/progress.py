"""Progress display of programs that only sample responses."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from jaxrl_llm.metrics.console import Bar, duration


class Progress(Bar):
  """Shows responses, tokens per second and time left, as a bar or as lines.

  A context manager: on a terminal, the bar is visible inside the context;
  elsewhere, lines are written.
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
      total: number of responses that will be sampled.
      stream: output stream; standard error if None.
      clock: returns seconds; only differences matter.
    """
    super().__init__(total, stream or sys.stderr, clock)
    self.responses = self.tokens = 0  # Of completed responses.

  @property
  def seconds(self) -> float:
    """Seconds since the start; never 0."""
    return max(self.tasks[0].elapsed, 1e-9)

  def report(self, responses: int, tokens: int) -> None:
    """Updates the bar with completed and running responses; writes no lines."""
    done, total = self.responses + responses, self.tasks[0].total
    left = self.seconds / done * (total - done) if done else None
    rate = (self.tokens + tokens) / self.seconds
    self.show(
      done,
      f"{done:,}/{total:,} responses  {rate:,.0f} tokens/s"
      f"  left {duration(left)}",
    )

  def complete(self, responses: int, tokens: int) -> None:
    """Counts completed responses and updates the display."""
    self.responses += responses
    self.tokens += tokens
    self.report(0, 0)
    if self.disable:
      self.write(self.tasks[0].description)
