"""Stops a run on a signal: after the step, with everything saved."""

import contextlib
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Iterator

from jaxrl_llm.system import processes

_NAMES = (signal.SIGINT, signal.SIGTERM)
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
  """Makes SIGINT and SIGTERM end the run after the step; a second one at once.

  The first one is acknowledged at once on standard error. Outside the main
  thread, which alone handles signals, nothing changes.
  """
  stopped = Stopped()
  if threading.current_thread() is not threading.main_thread():
    yield stopped
    return

  def handle(number, frame):
    del frame
    stopped.signal = number

  # Python calls a handler only when the main thread returns from compiled code,
  # which may take minutes. The number of the signal is written to this socket
  # without delay, and a thread reads it.
  reader, writer = socket.socketpair()
  writer.setblocking(False)
  watcher = threading.Thread(
    target=_answer, args=(reader, stopped), daemon=True
  )
  watcher.start()
  before = {name: signal.signal(name, handle) for name in _NAMES}
  woken = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
  try:
    yield stopped
  finally:
    signal.set_wakeup_fd(woken)
    for name, handler in before.items():
      signal.signal(name, handler)
    writer.close()
    watcher.join()
    reader.close()


def _answer(reader: socket.socket, stopped: Stopped) -> None:
  """Reports what the first signal waits for; the second ends the process."""
  received = False
  while number := reader.recv(1):
    if number[0] not in _NAMES:
      continue
    if received:  # The main thread has not handled the first one yet.
      os._exit(128 + number[0])
    received = True
    text = f"finishing {stopped.doing}; press Ctrl-C again to stop now"
    # Not print: the main thread may hold the lock of its buffer.
    os.write(2, f"\n{text}\n".encode())
