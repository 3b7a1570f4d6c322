"""Ends a process that hangs, and reports where it hangs."""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator


class Watchdog:
  """Tracks the current phase of a process and when it began.

  Attributes:
    suspects: returns lines that name the hosts that may have caused a hang; no
      lines by default.
  """

  def __init__(self):
    self.suspects: Callable[[], Iterable[str]] = tuple
    self._doing = "starting", time.monotonic()

  def enter(self, phase: str) -> None:
    """Records the start of a phase."""
    self._doing = phase, time.monotonic()

  @contextlib.contextmanager
  def watching(self, limit_s: float) -> Iterator[None]:
    """Ends the process if a phase takes longer than the limit; 0 is no limit.

    Runs in a thread because the main thread may hang in compiled code, in a
    collective or in a file system. Before exiting, prints the phase, its
    duration, host and process, the suspects and the stacks of all threads to
    standard error.
    """
    ended = threading.Event()
    watcher = threading.Thread(
      target=self._watch, args=(limit_s, ended), daemon=True
    )
    if limit_s:
      watcher.start()
    try:
      yield
    finally:
      ended.set()

  def _watch(self, limit_s: float, ended: threading.Event) -> None:
    while not ended.wait(min(1.0, limit_s / 10)):
      phase, since = self._doing
      taken = time.monotonic() - since
      if taken < limit_s:
        continue
      import jax  # Imported late: nothing else in this package needs it.

      process = f"{jax.process_index()} of {jax.process_count()}"
      print(
        f"\nstuck: {phase!r} has taken {taken:.0f} s on {socket.gethostname()}"
        f" (process {process}), more than config.run.stuck_after_s={limit_s:g};"
        " the run ends; resume from the last checkpoint with the same"
        " --workdir; stacks of all threads:",
        file=sys.stderr,
        flush=True,
      )
      # In a thread: a file system or a terminal that hangs must not keep the
      # process alive.
      naming = threading.Thread(target=self._name_suspects, daemon=True)
      naming.start()
      naming.join(20)
      os._exit(1)

  def _name_suspects(self) -> None:
    with contextlib.suppress(Exception):
      print(*self.suspects(), sep="\n", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=2, all_threads=True)
