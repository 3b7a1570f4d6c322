"""Rewards and environments in worker processes that can be killed.

Workers are fresh Python processes that speak JSON lines over pipes: they do
not import the caller's main module, share no state with it, and their death is
an ordinary result.
"""

import base64
import contextlib
import dataclasses
import functools
import json
import math
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.rewards.verdict import (
  PLAIN,
  Grading,
  RewardFn,
  Verdict,
  arguments,
  as_verdict,
  failure,
)

_START_DEADLINE_S = 120.0  # Imports on a busy machine.
_MEMORY_BYTES = 4 * 2**30  # Address space of a worker.
_LONGEST_ANSWER = 2**24  # Bytes; one that says more is ended.
_BOOT = (
  "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
  " from jaxrl_llm.rewards import pool; pool.serve(*sys.argv[2:])"
)


class CallPool:
  """Calls a function of data, inline or in processes that can be killed."""

  def __init__(
    self,
    fn: Callable[..., Any],
    *,
    workers: int = 0,
    deadline_s: float = 10.0,
    batch_deadline_s: float = math.inf,
  ):
    """Starts the workers.

    Args:
      fn: keyword arguments -> result, all JSON values; with workers, of an
        importable module.
      workers: processes; 0 calls inline, where nothing can be killed.
      deadline_s: seconds that one call may take in a worker.
      batch_deadline_s: seconds after which what is left of a batch is late.

    Raises:
      InputError: the function cannot be sent to workers.
    """
    self._fn, self._workers = fn, workers
    self._deadline_s, self._batch_deadline_s = deadline_s, batch_deadline_s
    self._pickled = _pickled(fn) if workers else ""
    self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    self.start()

  def __call__(
    self, jobs: Sequence[Mapping[str, Any]]
  ) -> list[tuple[Any, str | None]]:
    """(result, None) of each job, or (None, why there is none), in order."""
    if not self._workers:
      return [_answer(self._fn, job) for job in jobs]
    self.start()  # Some may have been closed since.
    # A thread waits for a worker; what takes time is in the processes.
    in_worker = functools.partial(
      self._in_worker, time.monotonic() + self._batch_deadline_s
    )
    with futures.ThreadPoolExecutor(self._workers) as threads:
      return list(threads.map(in_worker, jobs))

  def start(self) -> None:
    """Has as many workers as there should be."""
    while self._idle.qsize() < self._workers:
      self._idle.put(_Worker(self._pickled, self._deadline_s))

  def close(self) -> None:
    """Ends the workers."""
    while not self._idle.empty():
      self._idle.get().close()

  def _in_worker(
    self, end: float, job: Mapping[str, Any]
  ) -> tuple[Any, str | None]:
    deadline_s = min(self._deadline_s, end - time.monotonic())
    if deadline_s <= 0:
      return None, "timeout"
    worker = self._idle.get()
    try:
      if not worker.started():  # Something killed it while it was idle.
        worker.close()
        worker = _Worker(self._pickled, self._deadline_s)
      if not worker.started():
        raise RuntimeError(
          "a worker did not start: see its output above; can a fresh Python"
          f" import {self._fn}?"
        )
      answer, failed = worker.ask(json.dumps(job) + "\n", deadline_s)
      if not failed:
        with contextlib.suppress(ValueError, TypeError):
          result, why = json.loads(answer)
          return result, why
        failed = "crash"  # What it calls wrote among the answers.
      worker.close()
      worker = _Worker(self._pickled, self._deadline_s)
      return None, failed
    finally:
      self._idle.put(worker)


class RewardPool:
  """Judges batches of responses, inline or in killable processes."""

  def __init__(
    self,
    reward_fn: RewardFn,
    *,
    workers: int = 0,
    deadline_s: float = 10.0,
    batch_deadline_s: float = math.inf,
    grading: Grading = PLAIN,
  ):
    """Starts the workers.

    Args:
      reward_fn: a reward; with workers, a function of an importable module.
      workers: processes, as in `CallPool`; they live for one batch.
      deadline_s: seconds that one response may take in a worker.
      batch_deadline_s: as in `CallPool`.
      grading: how numbers become verdicts.

    Raises:
      ValueError: the reward needs workers or cannot be sent to them.
    """
    if workers == 0 and getattr(reward_fn, "needs_worker", False):
      raise ValueError(
        f"reward {reward_fn.__name__!r} may hang and needs workers >= 1, got"
        " workers=0"
      )
    self._reward_fn, self._grading = reward_fn, grading
    self._weights_fit = False
    self._calls = CallPool(
      functools.partial(_verdict, reward_fn, self._grading),
      workers=workers,
      deadline_s=deadline_s,
      batch_deadline_s=batch_deadline_s,
    )

  def judge(self, calls: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Judges responses, in order; a failed reward is marked.

    Args:
      calls: what is known of each response, see `arguments`.

    Raises:
      InputError: a weight names a part that the first responses do not have.
    """
    verdicts, jobs = [None] * len(calls), {}
    for row, call in enumerate(calls):
      try:
        jobs[row] = {"given": arguments(self._reward_fn, call)}
      except Exception as error:
        verdicts[row] = Verdict(False, None, failure(error))
    if jobs:
      found = self._calls(list(jobs.values()))
      # A response that poisons its worker cannot forge later verdicts.
      self._calls.close()
      self._calls.start()
      for row, (verdict, failed) in zip(jobs, found):
        verdicts[row] = Verdict(*(verdict or (False, None, failed)))
    self._check_weights(verdicts)
    return verdicts

  def _check_weights(self, verdicts: Sequence[Verdict]) -> None:
    """A weight of no part is a slip of the pen; told at the first verdicts."""
    if self._weights_fit or all(v.error for v in verdicts):
      return
    parts = {name for verdict in verdicts for name in verdict.parts}
    for name in self._grading.weights:
      if name not in parts:
        raise InputError(
          f"config.reward.weights names {name!r}, but the parts of the reward"
          f" are {sorted(parts) or 'none'}"
        )
    self._weights_fit = True

  def close(self) -> None:
    """Ends the workers."""
    self._calls.close()


class _Worker:
  """One process that answers a line with a line, or is killed."""

  def __init__(self, *arguments: object):
    command = [sys.executable, "-c", _BOOT, json.dumps(sys.path)]
    self._process = subprocess.Popen(
      command + [str(a) for a in arguments],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      start_new_session=True,  # Killed with all its children; no Ctrl-C.
    )
    self._started = False

  def started(self) -> bool:
    """Whether it lives; waits until it has come up."""
    if not self._started:
      said, _ = self.ask("", _START_DEADLINE_S)  # It begins by itself.
      self._started = bool(said)
    # Looked at and not reaped, so that its number stays its own.
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    ended = os.waitid(os.P_PID, self._process.pid, how)
    return self._started and ended is None

  def ask(self, text: str, deadline_s: float) -> tuple[bytes, str]:
    """The line it answers with, and why if there is none: late or dead."""
    end, answer = time.monotonic() + deadline_s, b""
    timer = threading.Timer(deadline_s, self._kill)
    timer.start()
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.write(text.encode())
      self._process.stdin.flush()
      answer = self._process.stdout.readline(_LONGEST_ANSWER)
    timer.cancel()
    timer.join()
    if time.monotonic() >= end:
      return b"", "timeout"
    return (answer, "") if answer.endswith(b"\n") else (b"", "crash")

  def _kill(self) -> None:
    # Not reaped yet, so the process group's number is still its own.
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)

  def close(self) -> None:
    """Ends the process and all its children."""
    self._kill()
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.close()
    self._process.stdout.close()
    self._process.wait()


def _pickled(fn: Callable[..., Any]) -> str:
  """What a fresh process needs to call it; a function goes by its name."""
  inner = fn.args[0] if isinstance(fn, functools.partial) else fn
  what = f"workers need a function of an importable module, got {inner}"
  with as_input_error(what, "use workers=0", Exception):
    if getattr(inner, "__module__", "") == "__main__":
      raise ValueError("the module __main__ is another one in a worker")
    return base64.b64encode(pickle.dumps(fn)).decode()


def serve(pickled: str, deadline_s: str):
  """Runs in a worker: answers each JSON line from stdin with one on stdout."""
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # What a function prints must not land among the answers.
  fn = pickle.loads(base64.b64decode(pickled))
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
  threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
  print("started", file=answers, flush=True)
  for line in sys.stdin:
    # Ends one that lets no other thread run, its parent having been killed.
    seconds = time.process_time() + float(deadline_s) + 2
    resource.setrlimit(
      resource.RLIMIT_CPU, (int(seconds), resource.RLIM_INFINITY)
    )
    print(json.dumps(_answer(fn, json.loads(line))), file=answers, flush=True)


def _end_with(parent: int) -> None:
  """Ends a worker and its children soon after its parent was killed."""
  while os.getppid() == parent:
    time.sleep(1.0)
  os.killpg(0, signal.SIGKILL)


def _answer(
  fn: Callable[..., Any], given: Mapping[str, Any]
) -> tuple[Any, str | None]:
  try:
    return fn(**given), None
  # Any failure is a mark, never a result; so is `exit()`, which inline would
  # end the run.
  except (Exception, SystemExit) as error:
    return None, failure(error)


def _verdict(
  reward_fn: RewardFn, grading: Grading, given: Mapping[str, Any]
) -> tuple:
  return dataclasses.astuple(as_verdict(reward_fn(**given), grading))
