"""Stops a run on a signal: after the step, with everything saved."""

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import types
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.system import processes, streams

_ASKED = (signal.SIGINT, signal.SIGTERM)
# These would end the process without a word: a closed terminal, a batch system
# or a limit that gives notice, a timer of user code.
_ELSE = "SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGVTALRM SIGPROF SIGXCPU".split()
# Stops a run like a signal, but is the exit code itself (EX_TEMPFAIL: "try
# again"). No signal has this number.
SUSPECT = 75


def name(number: int) -> str:
  """Returns the name of a signal, or of `SUSPECT`."""
  return "a suspect host" if number == SUSPECT else signal.Signals(number).name


@dataclasses.dataclass
class Stopped:
  """The signal that stops the run; 0 until one is received."""

  signal: int = 0
  doing: str = "the current work"  # The work that a signal waits for.

  def agreed(self) -> int:
    """Returns the signal that any process has received; 0 if none."""
    agreed = max(processes.gather(self.signal))
    if agreed:  # Otherwise a signal received meanwhile would be overwritten.
      self.signal = agreed
    return agreed


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Stopped]:
  """Makes a signal end the run after the step, instead of at once.

  This holds for SIGINT, SIGTERM and every other signal that would end the
  process; signals that it handles or ignores (nohup) stay so. A second SIGINT
  or SIGTERM ends the process at once. The first one is acknowledged at once on
  standard error. Outside the main thread, which alone handles signals, nothing
  changes.
  """
  stopped = Stopped()
  if threading.current_thread() is not threading.main_thread():
    yield stopped
    return

  def handle(number: int, _: types.FrameType | None) -> None:
    stopped.signal = number

  # Python calls a handler only when the main thread returns from compiled code,
  # which may take minutes. The number of the signal is written to this socket
  # without delay, and a thread reads it.
  reader, writer = socket.socketpair()
  writer.setblocking(False)
  watcher = threading.Thread(
    target=_answer, args=(reader, stopped, handle), daemon=True
  )
  watcher.start()
  other = [getattr(signal, name) for name in _ELSE]
  taken = [x for x in other if signal.getsignal(x) == signal.SIG_DFL]
  before = {name: signal.signal(name, handle) for name in (*_ASKED, *taken)}
  # As in Python: a write to a closed pipe raises, and does not end the process.
  before[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
  woken = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
  try:
    yield stopped
  finally:
    signal.set_wakeup_fd(woken)
    writer.close()
    watcher.join()  # It looks at the handlers.
    reader.close()
    for name, handler in before.items():
      signal.signal(name, handler)


def _answer(reader: socket.socket, stopped: Stopped, handle: Any) -> None:
  """Reports what the first signal waits for; a second request ends it."""
  seen = set()
  while number := reader.recv(1):
    if signal.getsignal(number[0]) is not handle:  # User code handles it.
      continue
    # A closed terminal sends several signals, which are no second request.
    asked = number[0] in _ASKED
    if asked and asked in seen:  # The main thread has not handled the first.
      os._exit(128 + number[0])
    if asked not in seen:
      seen.add(asked)
      text = f"finishing {stopped.doing}; press Ctrl-C again to stop now"
      # Not print: the main thread may hold the lock of its buffer.
      streams.Output(2).write(f"\n{text}\n".encode())
