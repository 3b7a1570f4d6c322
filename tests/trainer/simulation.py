"""Simulates the training loop on a file system with seeded faults.

    PYTHONPATH=.:tests:scripts/dev python tests/trainer/simulation.py --steps=N

The loop, the run's folder, the logger, the pipeline, the prompt source and the
checkpoints are real. Simple arithmetic replaces the models, and one file per
item replaces Orbax. Every call that changes files may fail: the process is
killed or loses power before it, the disk is full or broken, or SIGTERM arrives.
A power cut reverts unflushed content of files and unflushed renames. Between
processes, a bit of the newest checkpoint may flip.

Each seed is a run that is restarted until it is finished. Then its rows and its
last checkpoint must equal those of a run without faults. A seed determines all
calls.
"""

import argparse
import collections
import contextlib
import hashlib
import io
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import types
from concurrent import futures
from unittest import mock

import jax
import numpy as np
from helpers import tiny_run

from jaxrl_llm import sync
from jaxrl_llm.checkpoint import commit, manager, trees
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.data.tasks import Example
from jaxrl_llm.errors import InputError, TrainingStopped
from jaxrl_llm.learner.optimizer import TrainState
from jaxrl_llm.learner.state import LearnerState
from jaxrl_llm.rollout.pipeline import Pipeline
from jaxrl_llm.rollout.records import Batch, Collected, RolloutState
from jaxrl_llm.trainer import iteration, loop, summary
from jaxrl_llm.trainer.run import Run
from jaxrl_llm.types import Rollout, take_rows, unjudged

STEPS = 100  # Per run.
_EXAMPLES, _DRAWN = 101, 3
_SHARES = {"kill": 4, "power": 3, "full": 1, "broken": 1, "stop": 1}
_REAL = {
  name: getattr(os, name) for name in ("write", "fsync", "ftruncate", "replace")
}


class Killed(BaseException):
  """The process is dead: it must neither catch this nor change files."""


class Disk:
  """Makes calls fail, and tracks the data that would survive a power cut."""

  def __init__(self, root: pathlib.Path, seed: int, rate: float):
    self.root, self.rate = str(root), rate
    self.rng = random.Random(seed)
    self.faults = collections.Counter()
    self.calls = 0
    self.boot()

  def boot(self):
    """Starts a new process; unflushed data counts as flushed."""
    self.dead = self.stopped = False
    # Unflushed files -> number of bytes that are safe.
    self.dirty: dict[str, int] = {}
    # Folder -> unflushed renames in it: (from, to, replaced content).
    self.renamed = collections.defaultdict(list)

  def call(self):
    """Called before each call that changes files; may make it fail."""
    if self.dead:
      raise Killed
    self.calls += 1
    if self.rng.random() >= self.rate:
      return
    kind = self.rng.choices(list(_SHARES), list(_SHARES.values()))[0]
    # Without a handler, or the second time, it would end the simulation.
    listened = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    if kind == "stop" and (self.stopped or not listened):
      return
    self.faults[kind] += 1
    if kind == "stop":
      self.stopped = True
      signal.raise_signal(signal.SIGTERM)
    elif kind == "full":
      raise OSError(28, "No space left on device")
    elif kind == "broken":
      raise OSError(5, "Input/output error")
    else:
      self.dead = True
      if kind == "power":
        self._cut()
      raise Killed

  def up_to(self, size: int) -> int:
    """Draws a number of bytes in one random draw, as sizes vary with times."""
    return round(self.rng.random() * size)

  def _cut(self):
    """Loses some of the unflushed names and contents."""
    for renames in self.renamed.values():
      kept = self.rng.randint(0, len(renames))
      for source, target, before in reversed(renames[kept:]):
        if os.path.lexists(target) and not os.path.lexists(source):
          _REAL["replace"](target, source)
          self._move(target, source)
          if before is not None:
            pathlib.Path(target).write_bytes(before)
    for name, safe in self.dirty.items():
      if os.path.isfile(name) and os.path.getsize(name) > safe:
        os.truncate(name, safe + self.up_to(os.path.getsize(name) - safe))

  def _move(self, source: str, target: str):
    """Renames entries of unflushed files."""
    for name in list(self.dirty):
      if name == source or name.startswith(f"{source}/"):
        self.dirty[target + name.removeprefix(source)] = self.dirty.pop(name)

  def wrote(self, path: str, safe: int | None = None):
    """Called after a write; the first `safe` bytes are unchanged."""
    if safe is None:
      safe = os.path.getsize(path) if os.path.exists(path) else 0
    self.dirty[path] = min(safe, self.dirty.get(path, safe))

  def rename(self, source: str, target: str):
    before = None
    if os.path.isfile(target):
      before = pathlib.Path(target).read_bytes()
    self._move(source, target)
    self.renamed[os.path.dirname(target)].append((source, target, before))

  def flushed(self, path: str):
    self.dirty.pop(path, None)
    self.renamed.pop(path, None)


_disk: Disk | None = None


def _mine(path) -> str:
  """Returns the path if it is on the simulated disk, else ''."""
  if _disk is None or isinstance(path, int):
    return ""
  path = os.path.abspath(os.fsdecode(path))
  return path if path.startswith(_disk.root) else ""


def _audit(event: str, arguments: tuple):
  if _disk is None:
    return
  if event == "open":
    path, _, flags = arguments
    writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
    if writes and (path := _mine(path)):
      _disk.call()
      _disk.wrote(path, 0 if flags & os.O_TRUNC else None)
  elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
    if path := _mine(arguments[0]):
      _disk.call()
      if event == "os.rename":
        _disk.rename(path, _mine(arguments[1]))


def _of(descriptor: int) -> str:
  return _mine(os.readlink(f"/proc/self/fd/{descriptor}"))


def _write(descriptor, data):
  if path := _of(descriptor):
    if _disk.rng.random() < _disk.rate / 4:  # Only a part fits.
      data = data[: _disk.up_to(len(data))]
    _disk.call()
    _disk.wrote(path)
  return _REAL["write"](descriptor, data)


def _fsync(descriptor):
  if path := _of(descriptor):
    _disk.call()
    _disk.flushed(path)
  # The real one would only take time.


def _ftruncate(descriptor, size):
  if path := _of(descriptor):
    _disk.call()
    _disk.wrote(path, size)
  return _REAL["ftruncate"](descriptor, size)


class _Saver:
  """Replaces Orbax's async checkpointer: a file per item, then a rename."""

  def __init__(self, handler=None):
    self._begun = None

  def save(self, folder, items, force=False):
    self._begun = folder, jax.device_get(items)

  def wait_until_finished(self):
    (folder, items), self._begun = self._begun, None
    part = folder.with_name(folder.name + ".orbax-checkpoint-tmp")
    part.mkdir()
    for name, tree in items.items():
      leaves = jax.tree.leaves(tree)
      (part / name).write_bytes(
        b"".join(np.asarray(x).tobytes() for x in leaves)
      )
    if folder.exists():
      shutil.rmtree(folder)
    os.replace(part, folder)

  def restore(self, folder, items):
    def read(name, target):
      data, leaves = (folder / name).read_bytes(), []
      for x in jax.tree.leaves(target):
        size = int(np.prod(x.shape)) * x.dtype.itemsize
        part, data = data[:size], data[size:]
        values = np.frombuffer(part, x.dtype).reshape(x.shape)
        leaves.append(jax.device_put(values))
      return jax.tree.unflatten(jax.tree.structure(target), leaves)

    return {name: read(name, target) for name, target in items.items()}

  def close(self):
    pass

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass


class _Later:
  """An executor that runs a task when its result is first requested."""

  def __init__(self, *_):
    pass

  def submit(self, function, *arguments):
    work = types.SimpleNamespace(result=None)

    def exception():
      if work.result is None:
        try:
          function(*arguments)
          work.result = [None]
        except Exception as error:
          work.result = [error]
      return work.result[0]

    # At a random time: at once, or when the result is awaited.
    if _disk is not None and _disk.rng.random() < 0.5:
      exception()
    work.exception, work.done = exception, lambda: work.result is not None
    return work

  def shutdown(self):
    pass


def _policy(w, m):
  # On a device: host arrays would count as records of responses.
  w, m = jax.device_put((np.float32(w), np.float32(m)))
  return TrainState(trained={"w": w}, optimizer={"m": m})


class _Learner:
  """Arithmetic that depends on the entire batch."""

  critic = None
  algorithm = types.SimpleNamespace(lowest_reward=-np.inf)
  mesh = types.SimpleNamespace(
    devices=np.array([types.SimpleNamespace(device_kind="none")]), size=1
  )

  def init(self, **initial):
    return self.abstract().replace(
      models={"policy": _policy(np.zeros(4), np.zeros(4))}
    )

  def abstract(self):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.ShapeDtypeStruct((4,), np.float32, sharding=here)
    return LearnerState(
      step=0,
      models={"policy": TrainState(trained={"w": leaf}, optimizer={"m": leaf})},
      companions={},
      processor_states=None,
      waiting=None,
      base={"policy": {}},
      reference=None,
    )

  def constants(self):
    return {"reference": None, "frozen": {}}

  def update(self, state, responses, timer, scored=None):
    with timer.phase("update_policy"):
      rollout = responses.rollout
      grad = rollout.behavior_logprobs[:, :4].mean(axis=0)
      grad += rollout.version[0, 0]
      m = np.float32(0.9) * np.asarray(state.policy.optimizer["m"]) + grad
      w = np.asarray(state.policy.trained["w"]) - np.float32(0.01) * m
    state = state.replace(step=state.step + 1, models={"policy": _policy(w, m)})
    return state, {"policy/w": float(w.sum())}


class _Worker:
  """Draws responses from the weights, prompts and unfinished responses."""

  replay = None

  def __init__(self, source):
    self._source = source

  def init(self):
    return RolloutState(samples=0, store=None)

  def abstract(self):
    return RolloutState(samples=0, store=Rollout)

  def collect(self, state, source_state, weights, timer, arrived):
    with timer.phase("generate"):
      prompts, source_state = self._source.draw(source_state, _DRAWN)
      left = 0.0 if state.store is None else state.store.behavior_logprobs.sum()
      seen = np.asarray(weights.params["w"]).tobytes(), float(left)
      text = f"{seen} {state.samples} {[p.example_id for p in prompts]}"
      seed = hashlib.blake2b(text.encode(), digest_size=8).digest()
      rng = np.random.default_rng(int.from_bytes(seed, "little"))
      rollout = tiny_run.random_rollout(rng, rows=4)
      rollout = rollout.replace(
        version=np.full_like(rollout.version, weights.version)
      )
    metrics = {f"example/{i}": p.example_id for i, p in enumerate(prompts)}
    metrics |= {"rollout/tokens": 1.0, "perf/tokens": 1.0}
    batch = Batch(
      responses=unjudged(rollout), version=weights.version, metrics=metrics
    )
    after = RolloutState(
      samples=state.samples + 4, store=take_rows(rollout, np.arange(2))
    )
    return Collected(batch, after, source_state, [])

  def close(self):
    pass


class _Evaluator:
  """An evaluation that returns its inputs."""

  name, origin = "none", ""

  def __call__(self, params):
    mean = float(np.asarray(params["w"]).mean())
    return types.SimpleNamespace(
      judged=types.SimpleNamespace(new_failures=[]),
      shown=list,
      responses=types.SimpleNamespace(judged=np.ones(1, bool)),
      results=lambda tries: {"avg@1": mean},
    )


class _Examples:
  def __len__(self):
    return _EXAMPLES

  def __getitem__(self, index):
    return Example(id=str(index), question="?", answer="", source="none")


_TRANSFER = sync.WeightTransfer(
  lambda params: params, {"w": jax.ShapeDtypeStruct((4,), np.float32)}
)


def make_run(config) -> Run:
  """Makes the parts of a run for a new process."""
  source = PromptSource(
    _Examples(),
    lambda example: [1],
    types.SimpleNamespace(decode=lambda *_, **__: "", fewest=len),
    seed=3,
    max_prompt_length=1,
  )
  return Run(
    config=config,
    source=source,
    worker=_Worker(source),
    pipeline=Pipeline(lag=config.schedule.lag, overlap=False, max_staleness=0),
    learner=_Learner(),
    transfer=_TRANSFER,
    parity_check=lambda params, weights: 0.0,
    check_batch=lambda batch: None,
    pretraining=None,
    critic_params=None,
    evaluators=[_Evaluator()],
    judge=types.SimpleNamespace(tell=None, failure="", close=lambda: None),
    tokenizer=None,
    inputs={},
  )


def outcome(folder: pathlib.Path):
  """Returns the rows and the content of the last checkpoint."""
  record = commit.read(folder / "checkpoints" / str(STEPS))
  rows = tiny_run.comparable(folder)
  return rows, record["leaves"], record["states"]


def rot(disk: Disk, folder: pathlib.Path, rotten: set[int]):
  """Flips a bit of the newest checkpoint if another one is intact."""
  found = commit.steps(folder / "checkpoints")
  # A finished run reads no checkpoints any more.
  good = [s for s in found if s not in rotten and s < STEPS]
  if len(good) < 2 or disk.rng.random() > 0.1:
    return
  place = folder / "checkpoints" / str(good[-1])
  file = disk.rng.choice(sorted(f for f in place.iterdir() if f.is_file()))
  data = bytearray(file.read_bytes())
  data[disk.up_to(len(data) - 1)] ^= 1 << disk.rng.randrange(8)
  file.write_bytes(data)
  rotten.add(good[-1])
  disk.faults["flip"] += 1


@contextlib.contextmanager
def _without_models():
  """Disables the loop's reports on models and texts: there are none here."""
  with (
    mock.patch.object(summary, "describe", lambda run: []),
    mock.patch.object(iteration, "samples_of_step", lambda *_: []),
  ):
    yield


def simulate(
  config, folder: pathlib.Path, seed: int, rate: float
) -> tuple[Disk, int]:
  """Restarts a run until it ends; returns the disk and the number of starts."""
  global _disk
  disk, rotten, starts = Disk(folder, seed, rate), set(), 0
  while True:
    starts += 1
    said = io.StringIO()
    disk.boot()
    _disk = disk
    try:
      with contextlib.redirect_stdout(said), _without_models():
        loop.train(make_run(config), folder)
    except Killed:
      pass
    except (OSError, TrainingStopped) as error:
      if not any(word in str(error) for word in ("space", "output", "full")):
        raise
    except InputError as error:
      if "cannot be written" not in str(error):
        raise
    finally:
      _disk = None
    again = set(commit.steps(folder / "checkpoints"))
    if STEPS in again and not disk.dead:
      done = tiny_run.comparable(folder)
      if done and done[-1]["step"] == STEPS:
        return disk, starts
    rotten &= again
    rot(disk, folder, rotten)


def main(arguments: list[str] | None = None) -> int:
  """Runs seeds until the given number of steps is done; prints a summary."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=5000)
  parser.add_argument("--seed", type=int, default=0, help="the first")
  parser.add_argument("--rate", type=float, default=0.01, help="of calls")
  options = parser.parse_args(arguments)
  sys.addaudithook(_audit)
  os.write, os.fsync, os.ftruncate = _write, _fsync, _ftruncate
  trees.make = lambda kind, members: kind(None)
  manager.ocp = trees.ocp = types.SimpleNamespace(
    AsyncCheckpointer=_Saver,
    Checkpointer=_Saver,
    args=types.SimpleNamespace(
      StandardSave=lambda tree: tree,
      PyTreeRestore=lambda tree, **_: tree,
      Composite=dict,
    ),
    checkpoint_utils=types.SimpleNamespace(
      construct_restore_args=lambda tree: None
    ),
  )
  manager.concurrent = types.SimpleNamespace(
    futures=types.SimpleNamespace(
      ThreadPoolExecutor=_Later, Future=futures.Future
    )
  )
  begun, total = time.perf_counter(), collections.Counter()
  with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
    folder = pathlib.Path(folder)
    model = tiny_run.write_model(folder / "model")
    expected = {}
    for lag in (0, 1):
      config = tiny_run.make_config(
        model,
        run__steps=STEPS,
        run__stuck_after_s=0.0,
        checkpoint__every=3,
        eval__every=50,
        schedule__lag=lag,
      )
      simulate(config, folder / f"whole{lag}", 0, 0.0)
      expected[lag] = config, outcome(folder / f"whole{lag}")
    for seed in range(options.seed, options.seed + options.steps // STEPS):
      config, wanted = expected[seed % 2]
      disk, starts = simulate(config, folder / "run", seed, options.rate)
      if outcome(folder / "run") != wanted:
        print(f"seed {seed}: rows or arrays differ from those without faults")
        return 1
      total += disk.faults
      total.update(calls=disk.calls, starts=starts)
      shutil.rmtree(folder / "run")
  print(json.dumps({"steps": options.steps, **total}))
  print(f"{time.perf_counter() - begun:.0f} s", file=sys.stderr)
  return 0


if __name__ == "__main__":
  sys.exit(main())
