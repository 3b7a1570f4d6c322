"""Program of tests/processes_test.py: communication between processes."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent import futures

import jax
import numpy as np
import psutil
from absl import app, flags
from jax._src import distributed

from jaxrl_llm import checkpoint
from jaxrl_llm.checkpoint import commit
from jaxrl_llm.errors import InputError, TrainingStopped
from jaxrl_llm.sync import across
from jaxrl_llm.system import processes, signals

_COORDINATOR = flags.DEFINE_string("coordinator", "", "")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 1, "")
_PROCESS_ID = flags.DEFINE_integer("process_id", 0, "")
_DYING = flags.DEFINE_integer("dying", -1, "")
_FROZEN = flags.DEFINE_integer("frozen", -1, "")
_FOLDER = flags.DEFINE_string("folder", "", "")
_PATIENCE_S = flags.DEFINE_integer("patience_s", 10, "")


def refused(function, *args):
  """Returns the message of the error for users that a call raises."""
  try:
    function(*args)
  except (InputError, TrainingStopped) as error:
    return str(error)
  return None


def damaged():
  raise commit.DamagedError(pathlib.Path("run/3"), "a bit")


@dataclasses.dataclass(frozen=True)
class Known:
  """A state of host arrays, as many prompt sources have one."""

  scores: np.ndarray


def share(items):
  """Returns ten times each item; raises if one of them is 9."""
  if 9 in items:
    raise InputError("9 is too many")
  return [10 * x for x in items]


def check(index):
  assert jax.process_count() == 2 and len(jax.devices()) == 4
  # Messages of different sizes.
  assert processes.gather("x" * (1 + 100 * index)) == ["x", "x" * 101]
  assert processes.of_first(lambda: index) == 0
  assert processes.in_shares(share, [1, 2, 3]) == [10, 20, 30]
  assert processes.in_shares(share, [1]) == [10]
  assert refused(processes.in_shares, share, [9, 1]) == "9 is too many"
  assert refused(processes.of_first, share, [9]) == "9 is too many"
  try:  # An error is of the kind that the first process has raised.
    processes.of_first(damaged)
  except commit.DamagedError as error:
    assert error.what == "a bit" and "run/3: this check" in str(error)
  else:
    raise AssertionError
  mesh = jax.make_mesh((4,), ("x",))
  rows = np.arange(8.0, dtype=np.float32).reshape(4, 2)
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  split = processes.put({"rows": rows}, {"rows": place})["rows"]
  assert len(split.addressable_shards) == 2
  np.testing.assert_array_equal(processes.to_host([split])[0], rows)
  total = jax.jit(lambda x: x.sum())(split)
  assert processes.to_host(total) == rows.sum()


def check_apart(index):
  """Each process has a mesh; all receive the results, and arrays move."""
  devices = np.array(jax.devices()).reshape(2, 2)
  spec = jax.sharding.PartitionSpec
  halves = [
    jax.sharding.NamedSharding(jax.sharding.Mesh(x, ("x",)), spec("x"))
    for x in devices
  ]
  rows = np.arange(6, dtype=np.float32).reshape(2, 3) - 3
  double = jax.jit(lambda x: (2 * x, x.sum().astype("bfloat16")))
  both = [double(processes.put(rows + i, halves[i])) for i in range(2)]
  assert bool(both[0][0].addressable_shards) == (index == 0)
  own = [processes.has_device(half.mesh) for half in halves]
  assert own == [index == 0, index == 1]
  for i, (twice, total) in enumerate(processes.to_host(both)):
    np.testing.assert_array_equal(twice, 2 * (rows + i))
    assert total == (rows + i).sum() and total.dtype == "bfloat16"
  # To fewer devices, to more, and to overlapping ones; zeros keep their sign.
  whole = jax.sharding.Mesh(devices.flatten(), ("x",))
  places = [*halves, jax.sharding.NamedSharding(whole, spec(None, "x"))]
  values = [
    np.array([[0.0, -0.0, np.nan, 1.5], [2, -3, 4, 5]], np.float32),
    np.arange(12, dtype=np.int8).reshape(2, 6)[:, :4],
    np.linspace(-1, 1, 8).reshape(2, 4).astype("bfloat16"),
  ]
  for source in places:
    for target in places:
      arrays = [processes.put(x, source) for x in values]
      shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
      moved = across.make_move(shapes, [target] * 3)(arrays)
      for x, value in zip(moved, values):
        assert x.sharding == target
        assert processes.to_host(x).tobytes() == value.tobytes()


def check_checkpoints(index, folder, lag_s=5):
  """Both restore the newest step, though one does not see it for seconds.

  Each has a folder of its own for the storage that they share. The second
  one's is filled by a thread, the newest step in two parts. The state has
  arrays that are on no mesh.
  """
  here, there = folder / str(index), folder / "0"
  make = lambda step: {"source": Known(np.full(3, step, np.float32))}
  with contextlib.closing(checkpoint.Checkpointer(here, keep=2)) as saver:
    for step in (1, 2):
      saver.save_states(step, make(step))
      saver.wait()
    assert not any(processes.gather(saver.new_errors()))

    def arrive():
      for part in ("2/source.scores", "2"):
        time.sleep(lag_s / 2)
        shutil.copytree(there / part, here / part, dirs_exist_ok=True)

    if index:
      shutil.copytree(there / "1", here / "1")
      threading.Thread(target=arrive).start()
    restore = lambda step: saver.restore_states(step, make(0))["source"].scores
    found = processes.of_first(checkpoint.steps, here)
    restored, damaged = checkpoint.newest_undamaged(found, restore)
    assert found == [1, 2] and restored.tolist() == [2] * 3 and not damaged
    if index:
      (here / "2" / "source.scores" / "_METADATA").unlink()
    processes._APPEARS_S = 0.5
    said = refused(restore, 2)
    missing = folder / "1" / "2" / "source.scores" / "_METADATA"
    assert said.startswith(f"{missing}: process 1-{socket.gethostname()} does")


def check_threads(index):
  """Threads exchange at different speeds, in another order in each process."""

  def exchange(name, delays):
    for number in range(20):
      time.sleep(delays[index])
      assert processes.gather((name, number, index)) == [
        (name, number, i) for i in range(2)
      ]

  with futures.ThreadPoolExecutor(1, "slow") as thread:
    slow = thread.submit(exchange, "slow", (0.02, 0.0))
    exchange("fast", (0.0, 0.01))
    slow.result()
  store = distributed.global_state.client
  # Only messages of the last exchange are kept.
  held = {key for key, _ in store.key_value_dir_get_bytes("messages/slow_0")}
  assert {key.split("/")[-2] for key in held} <= {"20"}, held


def check_signals(index, rounds=20):
  """A signal at a random moment ends both processes at the same step."""
  rng = np.random.default_rng(index)
  for number in range(rounds):
    with signals.stop_on_signal() as stopped:
      if number % 2 == index:
        threading.Timer(
          rng.uniform(0, 0.05), os.kill, [os.getpid(), signal.SIGTERM]
        ).start()
      steps = 0
      while not stopped.agreed():
        # The other process waits for this one in every step.
        for _ in range(20_000 * (number % 2 != index)):
          pass
        steps += 1
        assert steps < 1000, f"round {number}: the signal was lost"
      assert stopped.signal == signal.SIGTERM
    assert len(set(processes.gather(steps))) == 1


def check_death(index):
  """One process dies or stops while the other waits for it."""
  with processes.ended_together():
    processes.gather(0)
    if index == _DYING.value:
      os.kill(os.getpid(), signal.SIGKILL)
    if index == _FROZEN.value:
      os.kill(os.getpid(), signal.SIGSTOP)
    processes.gather(1)


def check_address(coordinator):
  """The service listens at the given address and at no other."""
  host, port = coordinator.split(":")
  found = {
    x.laddr.ip
    for x in psutil.net_connections("tcp")
    if x.status == psutil.CONN_LISTEN and x.laddr.port == int(port)
  }
  assert {x.removeprefix("::ffff:") for x in found} == {host}


def main(_):
  processes.connect(
    _COORDINATOR.value,
    _NUM_PROCESSES.value,
    _PROCESS_ID.value,
    patience_s=_PATIENCE_S.value,
  )
  if max(_DYING.value, _FROZEN.value) >= 0:
    check_death(_PROCESS_ID.value)
    return
  check_address(_COORDINATOR.value)
  check(_PROCESS_ID.value)
  check_apart(_PROCESS_ID.value)
  folder = pathlib.Path(_FOLDER.value) / "checkpoints"
  check_checkpoints(_PROCESS_ID.value, folder)
  check_threads(_PROCESS_ID.value)
  check_signals(_PROCESS_ID.value)
  sys.stdout.write("met\n")


app.run(main)
