"""Runs rewards and environments in worker processes that can be killed.

A worker imports a function once and forks a child for every call. The child has
limits and is killed with all its descendants, so that a response that runs code
can affect neither later verdicts nor their timing.
"""

import base64
import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import pickle
import queue
import sys
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
from jaxrl_llm.system import contained
from jaxrl_llm.system.workers import Worker, channels, current_folder

_GRACE_S = 5.0  # Time for a worker to end an overdue call.


class CallPool:
  """Calls a function on JSON data, inline or in killable processes."""

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
      fn: keyword arguments -> result, all JSON values; with workers, a function
        of an importable module.
      workers: number of processes; 0 calls inline, where nothing can be killed.
      deadline_s: time limit of a call in a worker, in seconds.
      batch_deadline_s: time limit of a batch, in seconds; its remaining calls
        then time out.

    Raises:
      InputError: The function cannot be sent to workers.
    """
    self._fn, self._workers = fn, workers
    self._deadline_s, self._batch_deadline_s = deadline_s, batch_deadline_s
    self._pickled = _pickled(fn) if workers else ""
    self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    self.start()

  def __call__(
    self, jobs: Sequence[Mapping[str, Any]], sizes: Sequence[int] | None = None
  ) -> list[tuple[Any, str | None]]:
    """Returns (result, None) or (None, error) for each job, in order.

    Args:
      jobs: keyword arguments of each call.
      sizes: factor on the time limit of each job; 1 by default.
    """
    if not self._workers:
      return [_answer(self._fn, job) for job in jobs]
    self.start()  # Workers may have been closed in the meantime.
    # The threads only wait; the work is done in the processes.
    in_worker = functools.partial(
      self._in_worker, time.monotonic() + self._batch_deadline_s
    )
    with futures.ThreadPoolExecutor(self._workers) as threads:
      return list(threads.map(in_worker, jobs, sizes or [1] * len(jobs)))

  def start(self) -> None:
    """Starts missing workers."""
    while self._idle.qsize() < self._workers:
      path = json.dumps(current_folder())  # It may have the user's modules.
      self._idle.put(Worker(serve, self._pickled, path))

  def close(self) -> None:
    """Ends the workers."""
    while not self._idle.empty():
      self._idle.get().close()

  def _in_worker(
    self, end: float, job: Mapping[str, Any], size: int
  ) -> tuple[Any, str | None]:
    deadline_s = min(size * self._deadline_s, end - time.monotonic())
    if deadline_s <= 0:
      return None, "timeout"
    try:
      line = json.dumps([job, deadline_s], default=_jsonable)
    except (TypeError, ValueError) as error:
      return None, failure(error)
    worker = self._idle.get()
    try:
      return worker.ask(line, deadline_s + _GRACE_S)
    finally:
      self._idle.put(worker)


class RewardPool:
  """Judges batches of responses, inline or in killable processes."""

  def __init__(
    self,
    reward_fn: RewardFn,
    *,
    workers: int = 0,
    grading: Grading = PLAIN,
    **deadlines: float,
  ):
    """Starts the workers.

    Args:
      reward_fn: a reward; with workers, a function of an importable module.
        With `batched = True` it receives lists, with all responses of a group
        at once, and returns a list; a group shares a process and a time limit.
      workers: number of processes, as in `CallPool`.
      grading: conversion of numbers to verdicts.
      **deadlines: deadline_s and batch_deadline_s, as in `CallPool`.

    Raises:
      ValueError: The reward needs workers or cannot be sent to them.
    """
    if workers == 0 and getattr(reward_fn, "needs_worker", False):
      raise ValueError(
        f"reward {reward_fn.__name__!r} may hang and needs workers >= 1, got"
        " workers=0"
      )
    self._reward_fn, self._grading = reward_fn, grading
    self._batched = getattr(reward_fn, "batched", False)
    self._weights_fit = False
    fn = functools.partial(_verdicts, reward_fn, grading)
    self._calls = CallPool(fn, workers=workers, **deadlines)

  def judge(self, calls: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Judges responses, in order; the verdict of a failed reward has an error.

    Args:
      calls: inputs of the reward for each response, see `arguments`; a batched
        reward judges responses of equal `group` together.

    Raises:
      InputError: A weight names a part that the first responses do not have.
    """
    verdicts, jobs = [None] * len(calls), {}
    parts: dict[Any, list[int]] = {}
    for row, call in enumerate(calls):
      if failed := call.get("conversation", {}).get("failed"):
        verdicts[row] = Verdict(False, None, f"environment: {failed}")
        continue
      try:
        jobs[row] = arguments(self._reward_fn, call)
        part = call.get("group", row) if self._batched else row
        parts.setdefault(part, []).append(row)
      except Exception as error:
        verdicts[row] = Verdict(False, None, failure(error))
    given = [{"given": [jobs[row] for row in rows]} for rows in parts.values()]
    sizes = [len(rows) for rows in parts.values()]
    found = self._calls(given, sizes) if given else []
    for rows, (results, failed) in zip(parts.values(), found):
      new = checked(results, failed, len(rows), self._grading)
      for row, verdict in zip(rows, new):
        verdicts[row] = verdict
    self._check_weights(verdicts)
    return verdicts

  def _check_weights(self, verdicts: Sequence[Verdict]) -> None:
    """Raises an InputError if weights name parts that the reward lacks."""
    if self._weights_fit or all(v.error for v in verdicts):
      return
    # A TRL function may give no part: it may not apply to any response.
    parts = {*getattr(self._reward_fn, "parts", ())}
    parts |= {name for verdict in verdicts for name in verdict.parts}
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


def checked(
  results: Any, failed: str | None, count: int, grading: Grading
) -> list[Verdict]:
  """Checks a worker's verdicts, because code in a response may forge them."""
  verdicts = [Verdict(False, None, failed or "crash")] * count
  if not failed and isinstance(results, list) and len(results) == count:
    for row, result in enumerate(results):
      with contextlib.suppress(Exception):
        verdicts[row] = as_verdict(Verdict(*result), grading)
  return verdicts


def _jsonable(value: Any) -> Any:
  """Converts a NumPy array or scalar, as columns of user data may have."""
  if hasattr(value, "tolist"):
    return value.tolist()
  raise TypeError(f"workers cannot be sent a {type(value).__name__}")


def _inner(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the user's function inside a partial."""
  return fn.args[0] if isinstance(fn, functools.partial) else fn


def _pickled(fn: Callable[..., Any]) -> str:
  """Pickles a function by name, for worker processes."""
  inner = _inner(fn)
  what = f"workers need a function of an importable module, got {inner}"
  with as_input_error(what, "use workers=0", Exception):
    if getattr(inner, "__module__", "") == "__main__":
      raise ValueError("__main__ is a different module in a worker")
    return base64.b64encode(pickle.dumps(fn)).decode()


def serve(pickled: str, path: str) -> None:
  """Serves calls in a worker: one JSON line in, one JSON line out.

  Args:
    pickled: the function, see `_pickled`.
    path: entries of `sys.path` for the user's modules, as JSON.
  """
  pipes = channels()
  sys.path += json.loads(path)
  fn = pickle.loads(base64.b64decode(pickled))
  getattr(_inner(fn), "prepare", lambda: None)()
  gc.freeze()  # A garbage collection in a child would copy all memory pages.

  def answer(given: Mapping[str, Any], mark: str, write: int) -> None:
    with os.fdopen(write, "w") as file:
      file.write(f"{mark}{json.dumps(_answer(fn, given))}\n")

  contained.serve(pipes, answer, _line)


def _line(output: bytes) -> str:
  """Returns an answer; '' if anything follows its line."""
  line, end, rest = output.decode(errors="replace").partition("\n")
  return line if end and not rest else ""


def _answer(
  fn: Callable[..., Any], given: Mapping[str, Any]
) -> tuple[Any, str | None]:
  own = os.getpid()
  try:
    return fn(**given), None
  # Any failure is an error, never a result. This includes `exit()`, which would
  # end the run when called inline.
  except (Exception, SystemExit) as error:
    return None, failure(error)
  finally:
    if os.getpid() != own:  # A fork of user code must not continue the run.
      os._exit(0)


def _best(
  reward_fn: RewardFn, grading: Grading, given: Mapping[str, Any]
) -> Any:
  """Judges a response; of several right answers, the most favourable counts."""
  answers = given.get("answer")
  if not isinstance(answers, list):
    return reward_fn(**given)
  found = [reward_fn(**given | {"answer": answer}) for answer in answers]
  return max(
    (as_verdict(x, grading) for x in found),
    key=lambda verdict: (verdict.correct, verdict.value or 0.0),
  )


def _verdicts(
  reward_fn: RewardFn, grading: Grading, given: Sequence[Mapping[str, Any]]
) -> list[tuple]:
  """Judges one response, or a group with a batched reward."""
  if getattr(reward_fn, "batched", False):
    together = {name: [x[name] for x in given] for name in given[0]}
    results = reward_fn(**together)
    if not isinstance(results, Sequence) or len(results) != len(given):
      raise TypeError(
        f"it returned {str(results)[:40]!r}; return a list with a result for"
        f" each of the {len(given)} responses"
      )
  else:
    results = [_best(reward_fn, grading, x) for x in given]
  return [dataclasses.astuple(as_verdict(x, grading)) for x in results]
