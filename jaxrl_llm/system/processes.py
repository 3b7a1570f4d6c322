"""Coordination of several processes that train together.

Each process has its own devices. All of them draw the same prompts, schedule
the same requests and start the same programs in the same order, so that their
devices meet in every collective. Work whose result could differ (files of the
run, rewards under deadlines, signals) is done by the first process or split
among all, and its result is shared. With a single process, every function here
runs locally.
"""

import collections
import contextlib
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed  # There is no public way to its client.
from jax.experimental import multihost_utils

from jaxrl_llm.errors import InputError, TrainingStopped

T = TypeVar("T")
_patience_s = 0  # Set by `connect`.
_waited_s = collections.defaultdict(float)  # By thread.
_ERRORS = {e.__name__: e for e in (InputError, TrainingStopped, OSError)}


def connect(
  coordinator: str = "", count: int = 0, index: int = -1, *, patience_s: int
) -> None:
  """Connects to the other processes; must come before any other use of JAX.

  Args:
    coordinator: HOST:PORT of the first process. If empty, JAX detects it,
      `count` and `index` from the cluster (Slurm, GKE, Cloud TPU, Open MPI).
    count: number of processes.
    index: number of this process.
    patience_s: seconds until a dead process is noticed.

  Raises:
    InputError: The processes cannot connect.
  """
  global _patience_s
  _patience_s = patience_s
  given = (coordinator, count, index) if coordinator else ()
  try:
    jax.distributed.initialize(
      *given,
      heartbeat_timeout_seconds=patience_s,
      shutdown_timeout_seconds=patience_s,
    )
  except (ValueError, RuntimeError) as error:
    reason = str(error).strip().splitlines()[0]
    raise InputError(
      f"the processes of the run cannot connect ({reason}); give each"
      " --coordinator=HOST:PORT of the first one, --num_processes and"
      " --process_id"
    ) from error


@contextlib.contextmanager
def ended_together() -> Iterator[None]:
  """Exits with code 1 if a collective fails because another process has died.

  Its line names the processes that do not answer. It comes before JAX, whose
  heartbeats take longer, aborts the process with the stacks of all threads. If
  the first process dies, which JAX's clients notice at once, JAX may be faster.
  """
  try:
    yield
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    # From `multihost_utils` the same error comes as a ValueError.
    foreign = isinstance(error, ValueError) and "Gloo" not in str(error)
    if jax.process_count() == 1 or foreign:
      raise
    reason = str(error).strip().splitlines()[0][:200]
    silent = ", ".join(map(str, _silent())) or "none"
    print(
      f"\nprocess {jax.process_index()} of {jax.process_count()} on"
      f" {socket.gethostname()}: a collective failed ({reason}); processes that"
      f" do not answer: {silent}; start all of them again with the same"
      " --workdir",
      file=sys.stderr,
      flush=True,
    )
    time.sleep(is_first())  # Others still read what the first one serves.
    os._exit(1)


def _silent() -> list[int]:
  """Returns the processes that do not report the failed collective."""
  client = distributed.global_state.client
  try:
    client.key_value_set(f"failed/{jax.process_index()}", "")
    time.sleep(min(5, _patience_s / 4))
    reports = client.key_value_dir_get("failed")
  except jax.errors.JaxRuntimeError:
    return [0]
  reported = {int(key.rpartition("/")[2]) for key, _ in reports}
  return sorted({*range(jax.process_count())} - reported)


def is_first() -> bool:
  """Returns whether this process writes the files of the run."""
  return jax.process_index() == 0


@contextlib.contextmanager
def waiting() -> Iterator[None]:
  """Counts the time of its body as waiting for devices or processes."""
  start = time.perf_counter()
  try:
    yield
  finally:
    _waited_s[threading.get_ident()] += time.perf_counter() - start


def waited_s() -> float:
  """Returns the seconds that the calling thread has waited so far."""
  return _waited_s[threading.get_ident()]


def name() -> str:
  """Returns number and host, such as 3-worker; '' with a single process."""
  if jax.process_count() == 1:
    return ""
  return f"{jax.process_index()}-{socket.gethostname()}"


def gather(value: T) -> list[T]:
  """Returns the values of all processes in order; all must call it."""
  if jax.process_count() == 1:
    return [value]
  data = np.frombuffer(pickle.dumps(value), np.uint8)
  with waiting():
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    padded = np.pad(data, (0, int(sizes.max()) - data.size))
    rows = multihost_utils.process_allgather(padded)
  return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def of_first(function: Callable[..., T], *args: Any) -> T:
  """Calls a function in the first process; all return its result or raise.

  Raises:
    InputError, TrainingStopped, OSError: The first process raises it.
  """
  if jax.process_count() == 1:
    return function(*args)
  mine = _attempt(function, *args) if is_first() else None
  return _result(gather(mine)[0])


def in_shares(
  function: Callable[[Sequence[Any]], Sequence[T]], items: Sequence[Any]
) -> list[T]:
  """Maps a function over items, split among the processes.

  Raises:
    InputError, TrainingStopped, OSError: Any process raises it.
  """
  count = jax.process_count()
  if count == 1:
    return list(function(items))
  own = items[jax.process_index() :: count]
  mine = _attempt(function, own) if own else ([], None)
  results: list[Any] = [None] * len(items)
  for index, part in enumerate(gather(mine)):
    results[index::count] = _result(part)
  return results


def _attempt(function, *args) -> tuple[Any, tuple[str, str] | None]:
  """Returns the result of a function and the error that it raised."""
  try:
    return function(*args), None
  except tuple(_ERRORS.values()) as error:
    kind = next(k for k, e in _ERRORS.items() if isinstance(error, e))
    return None, (kind, str(error))


def _result(attempted: tuple[Any, tuple[str, str] | None]) -> Any:
  result, failed = attempted
  if failed:
    kind, text = failed
    raise _ERRORS[kind](text)
  return result


def put(tree: Any, places: Any) -> Any:
  """Puts host arrays, the same in all processes, on the devices of all.

  Args:
    tree: NumPy arrays.
    places: a sharding or a tree of them; None: wherever they are needed.
  """
  if jax.process_count() == 1:
    return jax.device_put(tree, places)

  def put_one(x, place):
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, place, lambda part: x[part])

  if places is None:
    return tree
  if isinstance(places, jax.sharding.Sharding):
    return jax.tree.map(lambda x: put_one(x, places), tree)
  return jax.tree.map(put_one, tree, places)


def to_host(tree: Any) -> Any:
  """Returns arrays as NumPy, gathered from all processes.

  All processes must call it, unless every device holds all of the arrays.
  """
  with waiting():
    if jax.process_count() == 1:
      return jax.device_get(tree)
    return jax.tree.map(_whole, tree)


def ready(tree: T) -> T:
  """Returns arrays once the devices have computed them."""
  with waiting():
    return jax.block_until_ready(tree)


def _whole(x: Any) -> np.ndarray:
  if not isinstance(x, jax.Array) or x.is_fully_addressable:
    return jax.device_get(x)
  if x.is_fully_replicated:
    return np.asarray(x.addressable_data(0))
  return multihost_utils.process_allgather(x, tiled=True)
