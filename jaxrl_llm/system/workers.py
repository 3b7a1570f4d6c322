"""Worker processes: fresh interpreters that answer lines and can be killed.

They do not import the caller's main module and share no state with it, and find
no module in the current folder, which may contain anything. The death of a
worker is reported as an ordinary result.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TextIO

from jaxrl_llm.system import streams

LONGEST_ANSWER = 2**24  # Bytes; longer answers end the worker.
_START_DEADLINE_S = 120.0  # Imports on a busy machine.
_PACKAGE = pathlib.Path(__file__).parents[1]

# The package is imported by its location, as its folder may be the current one.
_PREPARE = """
import importlib.util, json, os, sys
package, sys.path[:], variable, sys.argv[1:] = json.loads(sys.argv[1])
if variable is not None:
  os.environ["PYTHONPATH"] = variable  # For the programs of users.
name = os.path.basename(package)
spec = importlib.util.spec_from_file_location(name, package + "/__init__.py")
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
"""


def start(
  code: str, *arguments: str, variables: Mapping[str, str] = {}, **how: Any
) -> subprocess.Popen:
  """Starts Python code that imports nothing from the current folder.

  Args:
    code: a program that may import `jaxrl_llm`.
    *arguments: its arguments, in `sys.argv`.
    variables: additional environment variables.
    **how: further arguments of Popen.
  """
  here, variables = current_folder(), {**os.environ, **variables}
  variable = variables.pop("PYTHONPATH", None)  # The interpreter would use it.
  paths = [path for path in sys.path if path not in here]
  given = json.dumps([str(_PACKAGE), paths, variable, arguments])
  command = [sys.executable, "-P", "-c", _PREPARE + code, given]
  return subprocess.Popen(command, env=variables, **how)


def current_folder() -> list[str]:
  """Returns the entries of `sys.path` that are the current folder."""
  installed = sysconfig.get_paths().values()
  found = []
  for path in sys.path:
    with contextlib.suppress(OSError):  # Such as an archive that is missing.
      if not path or (path not in installed and os.path.samefile(path, ".")):
        found.append(path)
  return found


def has_ended(child: int) -> bool:
  """Returns whether a child has ended; its PID is not reused yet."""
  how = os.WEXITED | os.WNOHANG | os.WNOWAIT
  return os.waitid(os.P_PID, child, how) is not None


class Worker:
  """A process that answers each line with a line, restarted if it dies."""

  def __init__(self, serve: Callable[..., None], *arguments: str):
    """Starts the process.

    Args:
      serve: function of an importable module to run. It reads lines from
        `channels`, and writes a line when it is ready.
      *arguments: arguments of the function.
    """
    self._code = (
      f"from {serve.__module__} import {serve.__name__} as serve\n"
      "try: serve(*sys.argv[1:])\n"
      "except BrokenPipeError: os._exit(0)"  # The caller has ended.
    )
    self._arguments, self._asking = arguments, threading.Lock()
    self._mark = f"JAXRL_WORKER_{uuid.uuid4().hex}"
    self._start()

  def _start(self) -> None:
    self._process = start(
      self._code,
      *self._arguments,
      variables={self._mark: ""},  # Inherited by all its descendants.
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
    return self._started and not has_ended(self._process.pid)

  def ask(self, line: str, deadline_s: float) -> tuple[Any, str | None]:
    """Returns the answer to a line, a JSON pair; (None, error) if none came.

    Raises:
      RuntimeError: The process does not start.
    """
    with self._asking:
      if not self.started():  # Something killed it while it was idle.
        self._restart()
        if not self.started():
          raise RuntimeError("a worker did not start: see its output above")
      answer, failed = self._exchange(f"{line}\n", deadline_s)
      if failed:
        self._restart()
        return None, failed
    with contextlib.suppress(ValueError, TypeError, RecursionError):
      result, why = json.loads(answer)
      return result, why
    return None, "crash"  # User code wrote to the channel.

  def _restart(self) -> None:
    self.close()
    self._start()

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
    """Ends the process and all its descendants."""
    self._kill()
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.close()
    self._process.stdout.close()
    self._process.wait()
    self._end_rest()

  def _end_rest(self) -> None:
    """Ends descendants that are in other process groups.

    The process ends those itself, unless they have stopped or killed it.
    """
    for file in pathlib.Path("/proc").glob("[0-9]*/environ"):
      with contextlib.suppress(OSError):  # It has ended, or another user's.
        if self._mark.encode() in file.read_bytes():
          os.kill(int(file.parent.name), signal.SIGKILL)
    temporary = pathlib.Path(tempfile.gettempdir())
    for folder in temporary.glob(f"jaxrl-{self._process.pid}-*"):
      shutil.rmtree(folder, ignore_errors=True)


def channels() -> tuple[BinaryIO, TextIO]:
  """Returns a worker's input and output, separate from printed text.

  The standard streams of the process become an empty input and standard error,
  which drops what nobody reads.
  The input ends when the process that started the worker ends.
  """
  lines, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  streams.protect(patience_s=0.1)
  return lines, answers
