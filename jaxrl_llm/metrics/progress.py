"""Progress of a program that only samples responses."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from jaxrl_llm.metrics.console import Bar, duration


class Progress(Bar):
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
    super().__init__(total, stream or sys.stderr, clock)
    self.responses = self.tokens = 0  # Completed ones.

  @property
  def seconds(self) -> float:
    """Seconds since the start; never 0."""
    return max(self.tasks[0].elapsed, 1e-9)

  def report(self, responses: int, tokens: int) -> None:
    """Shows completed and running responses, on a bar only."""
    done, total = self.responses + responses, self.tasks[0].total
    left = self.seconds / done * (total - done) if done else None
    rate = (self.tokens + tokens) / self.seconds
    self.show(
      done,
      f"{done:,}/{total:,} responses  {rate:,.0f} tokens/s"
      f"  left {duration(left)}",
    )

  def complete(self, responses: int, tokens: int) -> None:
    """Counts completed responses and shows them."""
    self.responses += responses
    self.tokens += tokens
    self.report(0, 0)
    if self.disable:
      self.write(self.tasks[0].description)
