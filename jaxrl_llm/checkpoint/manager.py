"""Checkpoints with Orbax: items side by side, written in the background.

Items of a step are trees of arrays by the path of the state that they belong
to; they can be read apart, so evaluation and export read the policy alone.
Shardings come from the reader: a checkpoint of one mesh is restored onto any
other. What Orbax does not notice, a flipped bit or a save that failed, shows by
the COMMIT, see `checkpoint.commit`.
"""

import concurrent.futures
import functools
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_llm import digest
from jaxrl_llm.checkpoint import commit, state
from jaxrl_llm.errors import TrainingStopped
from jaxrl_llm.system import processes

_TEMPORARY = ("*.orbax-checkpoint-tmp*", "*.deleted")
_TREE = "tree"  # The item of `save_tree`.
_BASE = "base"  # Folder beside the steps.
T = TypeVar("T")


class Checkpointer:
  """Saves and restores steps under one directory, which one run writes.

  Several processes of a run write their parts of a step, and the first one its
  COMMIT, once all are on the disk.

  A save that fails does not end a run: `failures` counts them, and
  `new_errors` reports them. Earlier checkpoints stay.

  Attributes:
    directory: directory of the checkpoints.
    failures: number of failed saves so far.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    *,
    keep: int,
    keep_every: int = 0,
    best: Callable[[list[int]], int | None] = lambda steps: None,
  ):
    """Opens or creates the directory, and removes leftovers of killed saves.

    Args:
      directory: directory of the checkpoints.
      keep: number of newest steps to keep.
      keep_every: also keeps steps divisible by this number; 0 is off.
      best: (steps) -> one more step to keep, or None.
    """
    self.failures = 0
    self.directory = pathlib.Path(directory).absolute()
    self._keep, self._keep_every, self._best = keep, keep_every, best
    self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "commit")
    self._saving: tuple[int, concurrent.futures.Future] | None = None
    self._errors: list[str] = []
    processes.of_first(self._prepare)

  def latest_step(self) -> int | None:
    """Returns the newest complete step; None if there is none."""
    return max(commit.steps(self.directory), default=None)

  def save(
    self, step: int, trees: Mapping[str, Any], metadata: Mapping[str, Any]
  ) -> None:
    """Starts writing a step; the arrays may be donated right afterwards.

    Waits for the previous save. `new_errors` shows whether this one fails.

    Args:
      step: number of the step.
      trees: name -> tree of arrays.
      metadata: JSON-able values by name, returned by `record`.
    """
    self.wait()
    try:
      saving = self._start(step, trees, metadata)
    except Exception as error:  # Orbax raises errors of many kinds.
      saving = concurrent.futures.Future()
      saving.set_exception(error)
    self._saving = step, saving

  def _start(self, step, trees, metadata) -> concurrent.futures.Future:
    folder = self.directory / str(step)
    size = commit.num_bytes(trees)
    free = processes.of_first(lambda: shutil.disk_usage(self.directory).free)
    if free < size:
      raise OSError(f"it needs {size:,} bytes, and {free:,} are free")
    # Both are started before the arrays can be donated.
    checksums = digest.start_checksums(*digest.named_leaves(trees))
    items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    self._orbax.save(folder, ocp.args.Composite(**items), force=True)
    leaves = commit.describe(trees)
    record = {"step": step, "bytes": size, **metadata}
    return self._thread.submit(self._finish, folder, leaves, checksums, record)

  def _finish(self, folder, leaves, checksums, record) -> None:
    self._orbax.wait_until_finished()
    if not processes.is_first():
      return
    commit.write(folder, leaves, digest.finish_checksums(checksums), **record)
    # Only now: old checkpoints must stay until this one is complete.
    steps = commit.steps(self.directory)
    kept = {*steps[-self._keep :], self._best(steps)}
    if self._keep_every:
      kept |= {step for step in steps if step % self._keep_every == 0}
    for step in map(str, sorted({*steps} - kept)):
      old = self.directory / f"{step}.deleted"
      os.replace(self.directory / step, old)
      shutil.rmtree(old)

  def restore(self, step: int, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Reads some trees of a step without reading the others.

    Args:
      step: which step.
      targets: name -> tree of ShapeDtypeStructs with shardings.

    Returns:
      name -> tree like its target.

    Raises:
      DamagedError: The data differ from what was saved.
      InputError: The step does not exist or has other shapes.
    """
    return load(self.directory / str(step), targets)

  def save_states(
    self, step: int, states: Mapping[str, Any], **metadata: Any
  ) -> None:
    """Saves states by name, like `save`; see `checkpoint.state`."""
    trees, values = state.to_items(states)
    self.save(step, trees, {"states": values, **metadata})

  def restore_states(
    self, step: int, abstract: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Restores states by name, as given to `save_states`.

    Args:
      step: which step.
      abstract: states as in `checkpoint.targets`.

    Raises:
      InputError: As in `restore`, or the states have other parts.
    """
    values = self.record(step, "states")["states"]
    trees = self.restore(step, state.targets(abstract, values))
    return state.from_items(abstract, trees, values)

  def save_base(self, trees: Mapping[str, Any]) -> None:
    """Writes what no step changes beside the steps, once.

    Args:
      trees: name -> tree of arrays; without any nothing is written.

    Raises:
      TrainingStopped: it cannot be written.
    """
    folder = self.directory / _BASE
    if trees and not processes.of_first((folder / commit.FILE).exists):
      save_items(folder, trees)

  def record(self, step: int, *parts: str) -> dict[str, Any]:
    """Reads the COMMIT of a step, with these parts of the metadata.

    Raises:
      InputError: It cannot be read or was written by another version.
    """
    return commit.read(self.directory / str(step), *parts)

  def new_errors(self) -> list[str]:
    """Returns a line for every new failure, without waiting."""
    if self._saving and self._saving[1].done():
      self.wait()
    errors, self._errors = self._errors, []
    return errors

  def wait(self) -> None:
    """Waits until the save in progress is on disk or has failed."""
    if not self._saving:
      return
    (step, saving), self._saving = self._saving, None
    error = saving.exception()
    if error is None:
      return
    self.failures += 1
    self._errors.append(
      f"{self.directory / str(step)}: cannot write a checkpoint"
      f" ({_reason(error)}); free disk space. The last checkpoint"
      " is kept, and the next save is tried when it is due"
    )
    if processes.is_first():
      self._prepare()

  def close(self) -> None:
    """Waits and releases the directory."""
    self.wait()
    self._thread.shutdown()
    self._orbax.close()

  def _prepare(self) -> None:
    """Makes the directory and removes leftovers of killed saves."""
    self.directory.mkdir(parents=True, exist_ok=True)
    if not commit.steps(self.directory):  # Then it is another run's.
      shutil.rmtree(self.directory / _BASE, ignore_errors=True)
    for pattern in _TEMPORARY:
      for place in self.directory.glob(pattern):
        shutil.rmtree(place, ignore_errors=True)


def newest_undamaged(
  steps: Sequence[int], restore: Callable[[int], T]
) -> tuple[T | None, list[str]]:
  """Restores the newest undamaged step.

  Args:
    steps: step numbers, ascending; without any, the result is None.
    restore: restores one.

  Returns:
    The result of `restore`, and a line for each damaged newer step.

  Raises:
    DamagedError: All are damaged; the error of the newest one.
  """
  damaged = {}
  for step in reversed(steps):
    restored = failed = None
    try:
      restored = restore(step)
    except commit.DamagedError as error:
      failed = error
    # All processes must restore the same step.
    wrong = list(filter(None, processes.gather(failed and failed.what)))
    if wrong:
      damaged[step] = failed or commit.DamagedError(step, wrong[0])
    else:
      line = "checkpoint {} is damaged ({})".format
      return restored, [line(s, e.what) for s, e in damaged.items()]
  if damaged:
    raise damaged[steps[-1]]
  return None, []


def save_tree(path: str | os.PathLike, tree: Any) -> None:
  """Writes one tree of arrays to a directory, replacing its content.

  Raises:
    TrainingStopped: it cannot be written.
  """
  save_items(path, {_TREE: tree})


def save_items(path: str | os.PathLike, trees: Mapping[str, Any]) -> None:
  """Writes trees of arrays by name as a complete checkpoint.

  Raises:
    TrainingStopped: it cannot be written.
  """
  path = pathlib.Path(path).absolute()
  items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
    try:
      checkpointer.save(path, ocp.args.Composite(**items), force=True)
    except Exception as error:  # Orbax raises errors of many kinds.
      raise TrainingStopped(
        f"{path}: cannot write a checkpoint ({_reason(error)}); free disk"
        " space and resume with the same --workdir"
      ) from error
  leaves, checksums = commit.describe(trees), digest.checksums(trees)
  write = functools.partial(commit.write, bytes=commit.num_bytes(trees))
  processes.of_first(write, path, leaves, checksums)


def load_tree(path: str | os.PathLike, target: Any) -> Any:
  """Reads a tree written by `save_tree`.

  Args:
    path: its directory.
    target: tree of ShapeDtypeStructs with shardings.

  Raises:
    InputError: missing, damaged or of other shapes.
  """
  return load(path, {_TREE: target})[_TREE]


def load_base(
  directory: pathlib.Path, step: int, targets: Mapping[str, Any]
) -> dict[str, Any]:
  """Reads what `Checkpointer.save_base` wrote.

  Args:
    directory: of the steps.
    step: one of them; in format 4 each has it all.
    targets: as of `Checkpointer.restore`, which has the same errors.
  """
  base = directory / _BASE
  if not (base / commit.FILE).exists():
    base = directory / str(step)
  return load(base, targets)


def load(path: str | os.PathLike, targets: Mapping[str, Any]) -> dict[str, Any]:
  """Reads some items of a checkpoint; see `Checkpointer.restore`."""
  path = pathlib.Path(path).absolute()
  record = commit.read(path)
  names = [commit.saved_name(record, name) for name in targets]
  saved = dict(zip(names, targets.values()))
  commit.check_shapes(path, record, saved)
  items = {
    name: ocp.args.PyTreeRestore(
      tree,
      restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
      partial_restore=True,  # An item may have more than is asked for.
    )
    for name, tree in saved.items()
  }
  try:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
      found = checkpointer.restore(path, ocp.args.Composite(**items))
    trees = {name: found[name] for name in saved}
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(trees)):
      raise ValueError("an array is missing")
  except Exception as error:  # Orbax raises errors of many kinds.
    raise commit.DamagedError(path, _reason(error)) from error
  commit.check_bits(path, record, trees)
  return dict(zip(targets, trees.values()))


def load_whole(path: pathlib.Path, prefix: str = "") -> dict[str, Any]:
  """Reads items of a checkpoint, whatever their structure.

  Args:
    path: folder of the checkpoint.
    prefix: beginning of their names.

  Returns:
    name -> tree of NumPy arrays, of dicts and lists.

  Raises:
    InputError: It is missing or damaged.
  """
  record = commit.read(path)
  names = sorted({name.split("/")[0] for name in record["leaves"]})
  trees = {n: load_item(path / n) for n in names if n.startswith(prefix)}
  commit.check_bits(path, record, trees)
  return trees


def load_item(path: pathlib.Path) -> Any:
  """Reads an item that Orbax has written, of this package or another."""
  path = path.absolute()
  tree = ocp.PyTreeCheckpointHandler().metadata(path).tree
  to_host = lambda _: ocp.RestoreArgs(restore_type=np.ndarray)
  with ocp.PyTreeCheckpointer() as checkpointer:
    return checkpointer.restore(path, restore_args=jax.tree.map(to_host, tree))


def _reason(error: BaseException) -> str:
  """Returns the first line of an error, shortened in the middle."""
  reason = next(iter(str(error).strip().splitlines()), "")
  if len(reason) > 200:
    reason = f"{reason[:100]} ... {reason[-100:]}"
  return f"{type(error).__name__}: {reason}"
