"""Runs calls in child processes with limits, which leave nothing behind.

For worker processes, which have one thread: they fork a child for every call,
and adopt the descendants of a child that outlive their parents, so that these
can be found and killed even if they have left its process group and session.
"""

import contextlib
import ctypes
import functools
import json
import math
import os
import pathlib
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TextIO

from jaxrl_llm.system.workers import LONGEST_ANSWER, channels, has_ended

# Limits of a call. Each process has its own limits of memory and CPU time.
_MEMORY_BYTES = 4 * 2**30  # Address space.
_FILE_BYTES = 4 * 2**30  # Size of a file.
_PROCESSES = 512  # With their threads.
_PRINTED_BYTES = 2**16  # Printed text that is passed on.
_PROGRAM_BYTES = 2**20  # Printed by a program.

_COUNT_EVERY_S = 0.25  # Between counts of the processes of a call.
# Options of prctl(2).
_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36
_prctl = getattr(ctypes.CDLL(None), "prctl", lambda *_: -1)  # Linux only.


def limit(**most: int) -> None:
  """Lowers limits of this process and its descendants, and raises none.

  Args:
    **most: values of resource limits by name, such as AS and CPU.
  """
  for name, value in most.items():
    kind = getattr(resource, f"RLIMIT_{name}")
    # No limit is -1.
    lowest = min(value, *resource.getrlimit(kind), key=lambda x: x % 2**64)
    resource.setrlimit(kind, (lowest, lowest))


def serve(
  channels: tuple[BinaryIO, TextIO],
  run: Callable[[Any, str, int], None],
  read: Callable[[bytes], str],
  most: int = LONGEST_ANSWER,
) -> None:
  """Runs a job in a child process for each line of a worker's input.

  A line is [job, time limit in seconds] as JSON.

  Args:
    channels: input and output of the worker.
    run: (job, mark, file descriptor); writes the mark and its output.
    read: output -> answer, a JSON pair; '' if it is none.
    most: bytes of output after which the child is ended.
  """
  lines, answers = channels
  _prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
  kept = _descendants(set())  # Started by imported modules.
  print("started", file=answers, flush=True)
  for line in lines:
    job, deadline_s = json.loads(line)
    mark = os.urandom(16).hex()
    output, why = _call(
      functools.partial(run, job, mark),
      deadline_s,
      [lines.fileno(), answers.fileno()],
      kept,
      most,
    )
    text = read(output[len(mark) :]) if output.startswith(mark.encode()) else ""
    print(text or json.dumps([None, why or "crash"]), file=answers, flush=True)


def _call(
  function: Callable[[int], None],
  deadline_s: float,
  private: Sequence[int],
  kept: set[int],
  most: int,
) -> tuple[bytes, str]:
  """Calls a function in a child process, then ends all of its descendants.

  Temporary files of the child are deleted. Exits this process if its caller has
  died.

  Args:
    function: writes its output to the file descriptor that it gets.
    deadline_s: time limit, in seconds.
    private: file descriptors that the child must not have. The first one ends
      with the process that wants the output.
    kept: processes that are not ended; those of other users are added.
    most: bytes of output after which the child is ended.

  Returns:
    (output, ''), or (b'', 'timeout') or (b'', 'crash') if the child took too
    long or had too many processes.
  """
  with contextlib.ExitStack() as stack:
    folder = ""
    with contextlib.suppress(OSError):  # Such as a full disk.
      folder = stack.enter_context(
        tempfile.TemporaryDirectory(
          prefix=f"jaxrl-{os.getpid()}-", ignore_cleanup_errors=True
        )
      )
    (read, write), (said, say) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
      try:
        _prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        for channel in (*private, read, said):
          os.close(channel)
        os.dup2(say, 1)
        os.dup2(say, 2)
        os.close(say)
        if folder:
          os.environ["TMPDIR"] = tempfile.tempdir = folder
        _limit_call(deadline_s)
        function(write)
      finally:
        os._exit(0)
    for channel in (read, said, say):  # Open here, `said` has no end.
      stack.callback(os.close, channel)
    stack.callback(_end, child, kept)
    os.close(write)
    output, printed = bytearray(), bytearray()
    stack.callback(_show, printed, said)
    end = time.monotonic() + deadline_s
    count_at = time.monotonic() + _COUNT_EVERY_S
    while len(output) < most:
      now = time.monotonic()
      if now >= end:
        return b"", "timeout"
      if now >= count_at:
        count_at = now + _COUNT_EVERY_S
        if len(_descendants(kept)) > _PROCESSES:
          return b"", "crash"
      ready = _ready(min(end, count_at) - now, read, said, private[0])
      if private[0] in ready:
        sys.exit()
      if said in ready:
        printed[_PRINTED_BYTES:] = os.read(said, 2**16)
      if read in ready:
        part = os.read(read, 2**16)
        if not part:
          break
        output += part
      elif not ready and has_ended(child):
        break  # Other processes have not closed the output.
    return bytes(output), ""


def _show(printed: bytearray, said: int) -> None:
  """Prints text to standard error, which drops what nobody reads."""
  if _ready(0, said):
    printed += os.read(said, 2**16)
  text = printed[:_PRINTED_BYTES].decode(errors="replace")
  print(text, end="", file=sys.stderr, flush=True)


def _ready(wait_s: float, *streams: int) -> list[int]:
  """Waits until file descriptors can be read, and returns these."""
  return select.select(streams, [], [], wait_s)[0]


def _limit_call(deadline_s: float) -> None:
  """Limits this process, a call, and its descendants."""
  seconds = math.ceil(min(deadline_s, 1e6)) * (os.cpu_count() or 1) + 1
  limit(AS=_MEMORY_BYTES, FSIZE=_FILE_BYTES, CORE=0, CPU=seconds)
  with contextlib.suppress(OSError, ValueError):
    # The system counts all threads of a user; there are at most that many.
    with open("/proc/loadavg", "rb") as file:
      threads = file.read().split()[3].partition(b"/")[2]
    limit(NPROC=int(threads) + _PROCESSES)
  with contextlib.suppress(OSError):
    # If memory runs out, the system ends them and not the trainer.
    with open("/proc/self/oom_score_adj", "wb", 0) as file:
      file.write(b"1000")


def _end(child: int, kept: set[int]) -> None:
  """Kills a child and all processes below this one, except `kept`."""
  os.kill(child, signal.SIGKILL)
  os.waitpid(child, 0)
  while left := _descendants(kept):
    for pid in left:
      try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
      except PermissionError:
        kept.add(pid)  # Of another user.
      except (ProcessLookupError, ChildProcessError):
        pass  # Has ended, or is not a direct child yet.


def _descendants(kept: set[int]) -> set[int]:
  """Returns all processes below this one, except `kept` and those below."""
  with contextlib.suppress(ChildProcessError):  # There is none: most often.
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    parents = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
      with contextlib.suppress(OSError):  # It has ended.
        text = pathlib.Path("/proc", pid, "stat").read_bytes()
        parents[int(pid)] = int(text.rpartition(b")")[2].split()[1])
    found, new = set(), {os.getpid()}
    while new:
      below = {pid for pid, parent in parents.items() if parent in new}
      new = below.difference(found, kept)
      found |= new
    return found
  return set()


def serve_programs() -> None:
  """Runs Python programs in a worker; the answer is what they have printed."""
  printed = lambda output: json.dumps([output.decode(errors="replace"), None])
  serve(channels(), _run_program, printed, _PROGRAM_BYTES)


def _run_program(code: str, mark: str, write: int) -> None:
  """Replaces this process by a program, in the folder of temporary files."""
  os.write(write, mark.encode())
  try:
    os.chdir(tempfile.gettempdir())
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.execv(sys.executable, [sys.executable, "-I", "-c", code])
  except (OSError, ValueError) as error:  # Too long, or with a null character.
    os.write(write, f"error: {error}".encode())
