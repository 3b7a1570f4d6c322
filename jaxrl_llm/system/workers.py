"""Worker processes: fresh interpreters that answer lines and can be killed.

They do not import the caller's main module and share no state with it. The
death of a worker is reported as an ordinary result.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO, TextIO

LONGEST_ANSWER = 2**24  # Bytes; longer answers end the worker.
_START_DEADLINE_S = 120.0  # Imports on a busy machine.


class Worker:
  """A process that answers each line with a line, restarted if it dies."""

  def __init__(self, serve: Callable[..., None], *arguments: str):
    """Starts the process.

    Args:
      serve: function of an importable module to run. It reads lines from
        `channels`, and writes a line when it is ready.
      *arguments: arguments of the function.
    """
    boot = (
      "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
      f" from {serve.__module__} import {serve.__name__} as serve;"
      " serve(*sys.argv[2:])"
    )
    self._command = [sys.executable, "-c", boot, json.dumps(sys.path)]
    self._command += arguments
    self._start()

  def _start(self) -> None:
    self._process = subprocess.Popen(
      self._command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      start_new_session=True,  # Killed with all its children; no Ctrl-C.
    )
    self._started = False

  def started(self) -> bool:
    """Waits for the start and returns whether the process is alive."""
    if not self._started:
      # The first line comes without a request.
      self._started = bool(self._exchange("", _START_DEADLINE_S)[0])
    # Checked without reaping it, so that its PID is not reused.
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    ended = os.waitid(os.P_PID, self._process.pid, how)
    return self._started and ended is None

  def ask(self, line: str, deadline_s: float) -> tuple[Any, str | None]:
    """Returns the answer to a line, a JSON pair; (None, error) if none came.

    Raises:
      RuntimeError: The process does not start.
    """
    if not self.started():  # Something killed it while it was idle.
      self.close()
      self._start()
      if not self.started():
        raise RuntimeError("a worker did not start: see its output above")
    answer, failed = self._exchange(f"{line}\n", deadline_s)
    if failed:
      self.close()
      self._start()
      return None, failed
    with contextlib.suppress(ValueError, TypeError, RecursionError):
      result, why = json.loads(answer)
      return result, why
    return None, "crash"  # User code wrote to the channel.

  def _exchange(self, text: str, deadline_s: float) -> tuple[bytes, str]:
    """Returns the answer, or '' with the reason: timeout or crash."""
    end, answer = time.monotonic() + deadline_s, b""
    timer = threading.Timer(deadline_s, self._kill)
    timer.start()
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.write(text.encode())
      self._process.stdin.flush()
      answer = self._process.stdout.readline(LONGEST_ANSWER)
    timer.cancel()
    timer.join()
    if time.monotonic() >= end:
      return b"", "timeout"
    return (answer, "") if answer.endswith(b"\n") else (b"", "crash")

  def _kill(self) -> None:
    # Not reaped yet, so the ID of its process group has not been reused.
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)

  def close(self) -> None:
    """Ends the process and all its children."""
    self._kill()
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.close()
    self._process.stdout.close()
    self._process.wait()


def channels() -> tuple[BinaryIO, TextIO]:
  """Returns a worker's input and output, separate from printed text.

  The standard streams of the process become an empty input and standard error.
  The input ends when the process that started the worker ends.
  """
  lines, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  return lines, answers
