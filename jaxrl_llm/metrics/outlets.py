"""Consumers of a run's output, which cannot stop or delay the run."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

# Seconds without progress after which a consumer counts as hanging.
PATIENCE_S = 30.0


class Outlet:
  """A function whose errors are reported once and counted instead of raised."""

  def __init__(
    self, name: str, write: Callable[..., Any], tell: Callable[[str], Any]
  ):
    """Wraps a function.

    Args:
      name: name of the consumer, for messages.
      write: the function, which passes something to the consumer.
      tell: called with a line at the first error.
    """
    self.name, self._write, self._tell = name, write, tell
    self._lost, self._why = 0, ""

  def __call__(self, *args: Any) -> None:
    try:
      self._write(*args)
    except Exception as error:  # Of a library, a service or a file system.
      self._lose(error)

  def losses(self) -> list[str]:
    """Returns how often it failed, if at all."""
    return [f"{self._lost} x {self.name} ({self._why})"] * bool(self._why)

  def _lose(self, error: BaseException, count: int = 1) -> None:
    self._lost += count
    if not self._why:
      lines = str(error).strip().splitlines() or [""]
      self._why = f"{type(error).__name__}: {lines[0][:200]}"
      with contextlib.suppress(Exception):
        self._tell(f"{self.name}: {self._why}; the run goes on without it")


class Background(Outlet):
  """An outlet with a thread of its own: its consumer may also hang."""

  def __init__(
    self,
    name: str,
    opened: contextlib.AbstractContextManager[Callable[..., Any]],
    tell: Callable[[str], Any],
  ):
    """Opens the consumer in the thread, which also closes it.

    Args:
      name: name of the consumer, for messages.
      opened: yields the function that is called with everything.
      tell: called with a line at the first error.
    """
    super().__init__(name, self._put, tell)
    self._waiting: queue.SimpleQueue = queue.SimpleQueue()
    self._moved = time.monotonic()
    self._thread = threading.Thread(
      target=self._run, args=(opened,), name=name, daemon=True
    )
    self._thread.start()

  def close(self) -> None:
    """Waits until the consumer has everything, or hangs."""
    queued, before = self._waiting.qsize(), None
    self._waiting.put(None)
    while self._thread.is_alive() and before != self._waiting.qsize():
      before = self._waiting.qsize()
      self._thread.join(PATIENCE_S)
    if self._thread.is_alive():
      self._lose(self._late(), queued)

  def _put(self, *args: Any) -> None:
    if not self._waiting.qsize():
      self._moved = time.monotonic()
    elif time.monotonic() - self._moved > PATIENCE_S:
      raise self._late()
    self._waiting.put(args)

  def _late(self) -> TimeoutError:
    return TimeoutError(f"no answer for {PATIENCE_S:g} s")

  def _run(
    self, opened: contextlib.AbstractContextManager[Callable[..., Any]]
  ) -> None:
    waiting = iter(self._waiting.get, None)
    try:
      with opened as write:
        for args in waiting:
          try:
            write(*args)
          except BaseException as error:  # A service may also call exit.
            self._lose(error)
          self._moved = time.monotonic()
    except BaseException as error:
      self._lose(error, 0)
      for _ in waiting:
        self._lose(error)
