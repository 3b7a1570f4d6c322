"""Saves checkpoints with Orbax in the background, and restores them.

Items of a step are trees of arrays, named by their path in the state. They can
be read separately, so evaluation and export read only the policy. Shardings
come from the reader: a checkpoint saved on one mesh can be restored onto any
other. The COMMIT file reveals damage that Orbax does not notice, such as a
flipped bit or a failed save; see `checkpoint.commit`.
"""

import concurrent.futures
import errno
import functools
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxrl_llm import digest
from jaxrl_llm.checkpoint import commit, state
from jaxrl_llm.checkpoint import trees as trees_lib
from jaxrl_llm.errors import advice
from jaxrl_llm.system import processes

_TEMPORARY = ("*.orbax-checkpoint-tmp*", "*.deleted")
_BASE = "base"  # Folder next to the steps.
_RESTORE = "resume its run, which writes it again, or restore it from a copy"
T = TypeVar("T")


class Checkpointer:
  """Saves and restores the steps of one run in a directory.

  Each process of a run writes its part of a step, and the first one writes the
  COMMIT file once all parts are on disk.

  A failed save does not end the run: `failures` counts failed saves, and
  `new_errors` reports them. Earlier checkpoints are kept.

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
      best: (steps) -> an additional step to keep, or None.
    """
    self.failures = 0
    self.directory = pathlib.Path(directory).absolute()
    self._keep, self._keep_every, self._best = keep, keep_every, best
    self._orbax: ocp.AsyncCheckpointer | None = None  # Made by the first save.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "commit")
    self._saving: tuple[int, concurrent.futures.Future] | None = None
    self._errors: list[str] = []
    processes.of_first(lambda: self._prepare(parents=True))

  def latest_step(self) -> int | None:
    """Returns the newest complete step; None if there is none."""
    return max(commit.steps(self.directory), default=None)

  def save(
    self, step: int, trees: Mapping[str, Any], metadata: Mapping[str, Any]
  ) -> None:
    """Starts writing a step; the arrays may be donated right afterwards.

    Waits for the previous save. `new_errors` reports if this one fails.

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

  def _start(
    self, step: int, trees: Mapping[str, Any], metadata: Mapping[str, Any]
  ) -> concurrent.futures.Future:
    folder = self.directory / str(step)
    size = commit.num_bytes(trees)
    free = processes.of_first(lambda: shutil.disk_usage(self.directory).free)
    if free < size:
      few = f"it needs {size:,} bytes, but only {free:,} are free"
      raise OSError(errno.ENOSPC, few)
    # Both are started before the arrays can be donated.
    checksums = digest.start_checksums(*digest.named_leaves(trees))
    members = trees_lib.members_of(trees)
    if jax.process_index() in members:
      self._orbax = self._orbax or trees_lib.make(
        ocp.AsyncCheckpointer, members
      )
      self._orbax.save(folder, trees_lib.to_save(trees, members), force=True)
    record = {"step": step, "bytes": size, **metadata}
    leaves = commit.describe(trees)
    write = functools.partial(commit.write, folder, leaves, **record)
    return self._thread.submit(self._finish, write, checksums)

  def _finish(
    self, write: Callable[..., None], checksums: digest.Checksums
  ) -> None:
    if self._orbax is not None:
      self._orbax.wait_until_finished()
    if not processes.is_first():
      return
    # Copied to the host here: only the first process needs them.
    checksums = digest.finish_checksums(jax.device_get(checksums))
    write(checksums)
    # Only now: old checkpoints must stay until this one is complete.
    steps = commit.steps(self.directory)
    kept = {*steps[-self._keep :], self._best(steps)}
    if self._keep_every:
      kept |= {step for step in steps if step % self._keep_every == 0}
    for step in map(str, sorted({*steps} - kept)):
      old = self.directory / f"{step}.deleted"
      os.replace(self.directory / step, old)
      shutil.rmtree(old)

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
      step: number of the step.
      abstract: states as in `state.targets`.

    Raises:
      InputError: The states have other parts. For more errors see
        `checkpoint.load`.
    """
    values = self.record(step, "states")["states"]
    wanted = state.targets(abstract, values)
    trees = trees_lib.load(self.directory / str(step), wanted)
    return state.from_items(abstract, trees, values)

  def save_base(self, trees: Mapping[str, Any], again: str = "") -> None:
    """Writes arrays that no step changes, once, next to the steps.

    Args:
      trees: name -> tree of arrays; if empty, nothing is written.
      again: what is wrong with those written earlier, which are replaced.

    Raises:
      TrainingStopped: it cannot be written.
    """
    folder = self.directory / _BASE
    if again:
      self._errors.append(f"{again}: written again from the model")
    written = processes.of_first((folder / commit.FILE).exists)
    if trees and (again or not written):
      trees_lib.save_items(folder, trees)

  def record(self, step: int, *parts: str) -> dict[str, Any]:
    """Reads the COMMIT of a step, which must have these parts.

    Raises:
      InputError: It cannot be read or was written by another version.
    """
    return processes.of_first(commit.read, self.directory / str(step), *parts)

  def saving(self) -> bool:
    """Returns whether a save has started that was not waited for."""
    return self._saving is not None

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
    step, saving = self._saving
    error = saving.exception()
    self._saving = None
    if error is None:
      return
    self.failures += 1
    self._errors.append(
      f"{self.directory / str(step)}: cannot write a checkpoint"
      f" ({trees_lib.reason(error)}); {advice(error, 'check the disk')}. The"
      " last checkpoint is kept, and the run will save again when the next"
      " checkpoint is due"
    )
    if processes.is_first():
      self._prepare()

  def close(self) -> None:
    """Waits for the save in progress and stops the background threads."""
    self.wait()
    self._thread.shutdown()
    if self._orbax is not None:
      self._orbax.close()

  def _prepare(self, parents: bool = False) -> None:
    """Makes the directory and removes leftovers of killed saves."""
    # Later, without parents: the run's folder may have been moved.
    self.directory.mkdir(parents=parents, exist_ok=True)
    if not commit.steps(self.directory):  # The base is another run's.
      shutil.rmtree(self.directory / _BASE, ignore_errors=True)
    for pattern in _TEMPORARY:
      for place in self.directory.glob(pattern):
        shutil.rmtree(place, ignore_errors=True)


def newest_undamaged(
  steps: Sequence[int], restore: Callable[[int], T]
) -> tuple[T | None, list[str]]:
  """Restores the newest undamaged step.

  Args:
    steps: step numbers, ascending; if empty, the result is None.
    restore: (step) -> result; raises DamagedError if the step is damaged.

  Returns:
    The result of `restore`, and a line for each damaged newer step.

  Raises:
    DamagedError: All steps are damaged; the error is the newest step's.
  """
  damaged = {}
  for step in reversed(steps):
    restored = failed = None
    try:
      restored = restore(step)
    except commit.DamagedError as error:
      failed = error
    # All processes must restore the same step.
    failures = list(filter(None, processes.gather(failed)))
    if not failures:
      line = "checkpoint {} is damaged ({})".format
      return restored, [line(s, e.what) for s, e in damaged.items()]
    damaged[step] = failures[0]
  if damaged:
    newest = damaged[steps[-1]]
    if len(damaged) > 1:
      what = f"{newest.what}, and so are all earlier ones"
      todo = "restore one from a copy, or start again with another --workdir"
      newest = commit.DamagedError(newest.folder, what, todo)
    raise newest
  return None, []


def load_base(
  directory: pathlib.Path, targets: Mapping[str, Any]
) -> dict[str, Any]:
  """Reads arrays written by `Checkpointer.save_base`.

  Args:
    directory: directory of the steps.
    targets: as in `checkpoint.load`, which raises the same errors.
  """
  base = directory / _BASE
  if not processes.of_first((base / commit.FILE).exists):
    raise commit.DamagedError(base, f"{commit.FILE} is missing", _RESTORE)
  try:
    return trees_lib.load(base, targets)
  except commit.DamagedError as error:
    raise commit.DamagedError(base, error.what, _RESTORE) from error
