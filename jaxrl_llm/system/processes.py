"""Coordination of several processes that train together.

Each process has its own devices. All of them draw the same prompts, schedule
the same requests and start the same programs in the same order, so that their
devices meet in every collective. Work whose result could differ (files of the
run, rewards under deadlines, signals) is done by the first process or split
among all, and its result is shared. With a single process, every function here
runs locally.

Arrays are exchanged by collectives among the devices of their mesh. Results of
host work, and arrays whose mesh excludes some processes, go through the
key-value store of JAX's coordination service: each thread has a separate
channel, so that sampler and learner can run concurrently.
"""

import collections
import contextlib
import itertools
import json
import math
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax._src import distributed  # Its client has no public API.
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.errors import InputError, TrainingStopped
from jaxrl_llm.system import messages, workers

T = TypeVar("T")
_patience_s = 0  # Set by `connect`.
_waited_s = collections.defaultdict(float)  # By thread.
_cleared = collections.defaultdict(int)  # Messages deleted, by channel.
_sent = collections.defaultdict(int)  # Messages so far, by name of the thread.
_APPEARS_S = 30  # Within this time every host must see another one's files.
_BEATING = "alive"  # Name of the thread that shows that this process lives.
_ended = threading.Event()  # This process has disconnected.
_YEAR_MS = 365 * 24 * 3600 * 1000
_TOGETHER = InputError, TrainingStopped


def connect(
  coordinator: str = "", count: int = 0, index: int = -1, *, patience_s: int
) -> None:
  """Connects to the other processes; must come before any other use of JAX.

  Args:
    coordinator: HOST:PORT of the first process. If empty, JAX detects it,
      `count` and `index` from the cluster (Slurm, GKE, Cloud TPU, Open MPI).
    count: number of processes.
    index: number of this process.
    patience_s: seconds until a dead or frozen process is detected. The others
      then exit with code 1 and name it.

  Raises:
    InputError: The processes cannot connect.
  """
  global _patience_s
  _patience_s = patience_s
  # On CPUs, XLA would have a thread per core: too few for the devices of a
  # process to wait for those of others, and the run would hang.
  os.environ.setdefault("NPROC", str(max(32, os.cpu_count() or 1)))
  given = (coordinator, count, index) if coordinator else ()
  # JAX offers no other way to keep the service out of the first process.
  library, name = distributed._jax, "get_distributed_runtime_service"
  in_process = getattr(library, name)
  setattr(library, name, _Service)
  try:
    jax.distributed.initialize(
      *given,
      # Later than `_watch`: JAX aborts with the stacks of all threads.
      heartbeat_timeout_seconds=3 * patience_s,
      # By default, the service would listen on all interfaces.
      coordinator_bind_address=coordinator or None,
      shutdown_timeout_seconds=2 * patience_s,
    )
  except (ValueError, RuntimeError) as error:
    reason = str(error).strip().splitlines()[0]
    raise InputError(
      f"the processes of the run cannot connect ({reason}); give each"
      " --coordinator=HOST:PORT of the first one, --num_processes and"
      " --process_id"
    ) from error
  finally:
    setattr(library, name, in_process)
  if jax.process_count() > 1:
    threading.Thread(target=_watch, name="watch", daemon=True).start()


def disconnect() -> None:
  """Disconnects once all processes are done; does nothing without others."""
  global _patience_s
  if distributed.global_state.client is not None:
    patience_s, _patience_s = _patience_s, math.inf  # The others may end.
    jax.distributed.shutdown()
    # A thread within a call of the client would abort the interpreter's end.
    _ended.set()
    for thread in threading.enumerate():
      if thread.name == _BEATING:
        thread.join(patience_s)


class _Service:
  """JAX's coordination service in a separate process.

  In the first process, the service would die with it, and JAX would abort all
  others with the stacks of their threads before they can report which process
  died.
  """

  def __init__(self, *args: Any, **settings: Any):
    given = distributed._jax.__name__, args, settings, 2 * _patience_s
    self._process = workers.start(
      _SERVE,
      json.dumps(given),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,  # Says that clients leave.
      text=True,
      start_new_session=True,  # Not ended by Ctrl-C.
    )
    if not self._process.stdout.readline():
      raise RuntimeError(f"cannot listen at {args[0]}")

  def shutdown(self) -> None:
    """Ends the process; JAX calls it when all clients have disconnected."""
    self._process.communicate("end\n")


# Input that ends without a line means that the first process has died; the
# service then lingers, as the others still use it.
_SERVE = """
import importlib, json, sys, time
library, args, settings, linger_s = json.loads(sys.argv[1])
library = importlib.import_module(library)
service = library.get_distributed_runtime_service(*args, **settings)
print("started", flush=True)
if not sys.stdin.readline():
  time.sleep(linger_s)
"""


def _watch() -> None:
  """Ends this process when another one shows no sign of life for too long.

  Counts checks instead of seconds: a process that was frozen itself must not
  blame the others.
  """
  client = distributed.global_state.client
  # Read once: at the end of the program JAX would start its backends again.
  index, count = jax.process_index(), jax.process_count()
  beats, last, missed = {}, {}, collections.Counter()

  def beat() -> None:
    with contextlib.suppress(RuntimeError):  # The process is ending.
      for number in itertools.count():
        mine = f"alive/{index}", str(number)
        client.key_value_set(*mine, allow_overwrite=True)
        beats.update(client.key_value_dir_get("alive"))
        if _ended.wait(_look_s()):
          return

  # In a separate thread, as calls to a store in a frozen process block.
  threading.Thread(target=beat, name=_BEATING, daemon=True).start()
  while True:
    time.sleep(_look_s())
    for other in range(count):
      key = f"alive/{other}"
      same = beats.get(key) == last.get(key)
      missed[other] = missed[other] + 1 if same else 0
    last = dict(beats)
    silent = [i for i, n in missed.items() if n * _look_s() > _patience_s]
    if index in silent:  # Not even its own beats arrive.
      silent = [0]
    if silent:
      _end(f"no sign of life for {_patience_s} s", silent)


def _end(reason: str, silent: Sequence[int]) -> NoReturn:
  """Exits with code 1 and a line that names processes that do not answer."""
  names = ", ".join(map(str, silent)) or "none"
  print(
    f"\nprocess {jax.process_index()} of {jax.process_count()} on"
    f" {socket.gethostname()}: {reason}; processes that do not answer:"
    f" {names}; start all of them again with the same --workdir",
    file=sys.stderr,
    flush=True,
  )
  os._exit(1)


@contextlib.contextmanager
def ended_together() -> Iterator[None]:
  """Exits with code 1 if a collective fails because another process has died.

  Prints a line that names the processes that do not answer, before JAX, whose
  heartbeats take longer, aborts the process with the stacks of all threads.

  Errors that all processes raise together are passed on. After any other error
  this process exits at once, so that the others notice.
  """
  try:
    yield
  except Exception as error:
    if jax.process_count() == 1 or isinstance(error, _TOGETHER):
      raise
    reason = (str(error).strip().splitlines() or [""])[0][:200]
    # A jitted function may raise the same error as a ValueError.
    if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in reason:
      _end(f"a collective failed ({reason})", _silent())
    if not isinstance(error, OSError):
      traceback.print_exc()
    _end(f"{type(error).__name__}: {reason}", [])


def _silent() -> list[int]:
  """Returns the processes that no longer show a sign of life."""
  client = distributed.global_state.client
  try:
    before = client.key_value_dir_get("alive")
    time.sleep(2.5 * _look_s())
    after = dict(client.key_value_dir_get("alive"))
  except jax.errors.JaxRuntimeError:
    return [0]
  same = [key for key, beat in before if after[key] == beat]
  return sorted(int(key.removeprefix("alive/")) for key in same)


def _look_s() -> float:
  """Returns the seconds between two checks of the other processes."""
  return min(2, _patience_s / 8)


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
  """Returns index and host name, such as 3-worker; '' with one process."""
  if jax.process_count() == 1:
    return ""
  return f"{jax.process_index()}-{socket.gethostname()}"


def has_device(mesh: jax.sharding.Mesh) -> bool:
  """Returns whether a device of the mesh belongs to this process."""
  inside = {device.process_index for device in mesh.devices.flat}
  return jax.process_index() in inside


def gather(value: T) -> list[T]:
  """Returns the values of all processes in order; all must call it."""
  if jax.process_count() == 1:
    return [value]
  channel, number = _next_message()
  client, index = distributed.global_state.client, jax.process_index()
  parts, joined = f"{channel}/{number}/parts", f"{channel}/{number}/joined"
  with waiting():
    client.key_value_set_bytes(f"{parts}/{index}", messages.dumps(value))
    if is_first():
      count = range(jax.process_count())
      data = b"\n".join(_receive(f"{parts}/{i}") for i in count)
      # All processes have reached this call, so earlier messages were read.
      for old in range(_cleared[channel], number):
        client.key_value_delete(f"{channel}/{old}")
      client.key_value_delete(parts)
      _cleared[channel] = number
      client.key_value_set_bytes(joined, data)
    else:
      data = _receive(joined)
    return [messages.loads(part) for part in data.split(b"\n")]


def _next_message() -> tuple[str, int]:
  """Returns the channel of this thread, and the number of its next message."""
  channel = threading.current_thread().name
  _sent[channel] += 1
  return f"messages/{channel}", _sent[channel]


def _receive(key: str) -> bytes:
  """Waits for a message; `_watch` ends the process if the sender has died."""
  client = distributed.global_state.client
  return client.blocking_key_value_get_bytes(key, _YEAR_MS)


def of_first(function: Callable[..., T], *args: Any) -> T:
  """Calls a function in the first process; all return its result or error.

  Raises:
    InputError, TrainingStopped, OSError: The first process raises it.
  """
  if jax.process_count() == 1:
    return function(*args)
  mine = _attempt(function, *args) if is_first() else None
  return _result(gather(mine)[0])


def check_same(values: Mapping[str, Any]) -> None:
  """Checks that all processes have the same values, compared as text.

  Raises:
    InputError: They differ.
  """
  every = gather({name: repr(value) for name, value in values.items()})
  for index, other in enumerate(every):
    for name in sorted({*every[0], *other}):
      first, own = every[0].get(name), other.get(name)
      if first != own:
        raise InputError(
          f"process {index} has {name}: {own}, but process 0 {first}; start"
          " all processes with the same command, files and versions"
        )


def await_files(folder: pathlib.Path) -> None:
  """Waits until all processes see a folder's files as the first one does.

  On shared storage a file may appear on other hosts several seconds late.

  Raises:
    TrainingStopped: A process does not see a file after `_APPEARS_S` seconds.
  """
  if jax.process_count() == 1:
    return
  wanted, end = of_first(_sizes, folder), time.monotonic() + _APPEARS_S
  while (missing := wanted - _sizes(folder)) and time.monotonic() < end:
    time.sleep(0.1)
  lines = [
    f"{folder / file}: process {name()} does not see it after {_APPEARS_S} s,"
    " but the first one does; start all of them again on the same storage"
    for file, _ in sorted(missing)
  ]
  for line in itertools.chain.from_iterable(gather(lines[:1])):
    raise TrainingStopped(line)


def _sizes(folder: pathlib.Path) -> set[tuple[str, int]]:
  """Returns the paths of a folder and everything in it, with file sizes."""
  with contextlib.suppress(FileNotFoundError):  # Listed, but not visible yet.
    return {
      (str(file.relative_to(folder)), file.stat().st_size * file.is_file())
      for file in (folder, *folder.rglob("*"))
    }
  return set()


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


def _attempt(function: Callable[..., T], *args) -> tuple[Any, Exception | None]:
  """Returns the result of a function and the error that it raised."""
  try:
    return function(*args), None
  except _TOGETHER as error:
    return None, error
  except OSError as error:
    return None, OSError(str(error))  # Some subclasses have other arguments.


def _result(attempted: tuple[Any, Exception | None]) -> Any:
  result, failed = attempted
  if failed:
    raise failed
  return result


def put(tree: Any, places: Any) -> Any:
  """Puts host arrays, the same in all processes, on the devices of all.

  Args:
    tree: NumPy arrays.
    places: a sharding or a tree of them; None lets JAX place the arrays.
  """
  if jax.process_count() == 1:
    return jax.device_put(tree, places)
  if places is None:
    return tree

  def put_one(x: Any, place: jax.sharding.Sharding):
    x = np.asarray(x)
    part = x.__getitem__
    return jax.make_array_from_callback(x.shape, place, part, dtype=x.dtype)

  return jax.tree.map(put_one, tree, jax.tree.broadcast(places, tree))


def to_host(tree: Any) -> Any:
  """Returns arrays as NumPy, gathered from all processes.

  All processes must call it, even those without a device of the arrays.
  """
  with waiting():
    if jax.process_count() == 1:
      return jax.device_get(tree)
    leaves, structure = jax.tree.flatten(tree)
    found = [_whole(x) for x in leaves]
    senders = [_sender(x) for x in leaves]
    for sender in sorted({*senders} - {-1}):
      chosen = [i for i, x in enumerate(senders) if x == sender]
      values = _from(sender, [found[i] for i in chosen])
      for i, value in zip(chosen, values):
        found[i] = value
    return jax.tree.unflatten(structure, found)


def ready(tree: T) -> T:
  """Returns arrays once the devices have computed them."""
  with waiting():
    return jax.block_until_ready(tree)


def _whole(x: Any) -> np.ndarray | None:
  """Returns the full array; None if no device of this process has a part."""
  if not isinstance(x, jax.Array) or x.is_fully_addressable:
    return jax.device_get(x)
  if not x.is_fully_replicated:
    x = jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))
  return np.asarray(x.addressable_data(0)) if x.addressable_shards else None


def _sender(x: Any) -> int:
  """Returns the first process of an array's mesh; -1 if it has all of them."""
  if not isinstance(x, jax.Array) or not x.committed:
    return -1
  inside = {device.process_index for device in x.sharding.device_set}
  return -1 if len(inside) == jax.process_count() else min(inside)


def _from(sender: int, values: list[np.ndarray | None]) -> list[np.ndarray]:
  """Returns the values of one process; processes with values do not wait."""
  channel, number = _next_message()
  if jax.process_index() == sender:
    client = distributed.global_state.client
    client.key_value_set_bytes(f"{channel}/{number}", messages.dumps(values))
  elif any(value is None for value in values):
    return messages.loads(_receive(f"{channel}/{number}"))
  return values
