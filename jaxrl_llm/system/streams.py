"""Standard streams that cannot stop a program.

A log is read by others: `| head` ends, a pager stops reading, a terminal
closes, a disk fills up. Text that they do not take is dropped and counted.
"""

import contextlib
import fcntl
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any

PATIENCE_S = 5.0  # How long a reader may stop reading before text is dropped.
_NAMES = {1: "stdout", 2: "stderr"}
_PART = select.PIPE_BUF  # A pipe that can be written to takes as many bytes.


class Output(io.RawIOBase):
  """Bytes written to a file descriptor, or dropped; never raises or hangs.

  Attributes:
    name: stdout or stderr.
    lost: number of lines that were dropped.
    why: reason of the first loss.
    tell: called with a line at the first loss.
  """

  def __init__(self, number: int, patience_s: float = PATIENCE_S):
    super().__init__()
    self.tell: Callable[[str], Any] = lambda line: None
    # A copy: user code may close the original, and a file of the run that is
    # opened later would have its number.
    self.name, self._file = _NAMES[number], number
    with contextlib.suppress(OSError):
      self._file = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    self._patience_s, self.lost, self.why = patience_s, 0, ""

  def write(self, data: bytes | memoryview) -> int:
    left = memoryview(data).cast("B")
    whole = len(left)
    try:
      while left:
        ready = select.poll()
        ready.register(self._file, select.POLLOUT)
        if not ready.poll(0 if self.why else 1000 * self._patience_s):
          raise TimeoutError(None, "nobody reads it")
        left = left[os.write(self._file, left[:_PART]) :]
    except OSError as error:
      self.lost += max(bytes(left).count(b"\n"), 1)
      if not self.why:
        self.why = error.strerror
        self.tell(f"{self.name}: {self.why}; the run goes on\n")
    return whole

  def writable(self) -> bool:
    return True

  def fileno(self) -> int:
    return self._file

  def isatty(self) -> bool:
    return os.isatty(self._file)


_protected: list[Output] = []


def protect(patience_s: float = PATIENCE_S) -> None:
  """Makes standard output and error drop what nobody takes."""
  # A stream that was closed would get the number of a file of the run.
  while (file := os.open(os.devnull, os.O_RDWR)) < 3:
    pass
  os.close(file)
  _protected[:] = [Output(number, patience_s) for number in _NAMES]
  for output, other in zip(_protected, reversed(_protected)):
    # A lost line is reported on the other stream.
    output.tell = lambda line, other=other: other.write(line.encode())
    text = io.TextIOWrapper(
      io.BufferedWriter(output),
      getattr(getattr(sys, output.name), "encoding", "utf-8"),
      "backslashreplace",
      line_buffering=True,
    )
    setattr(sys, output.name, text)


def losses() -> list[str]:
  """Returns how much each protected stream has dropped, if anything."""
  return [f"{x.lost} lines of {x.name} ({x.why})" for x in _protected if x.lost]
