"""Checkpoints with Orbax: items side by side, written in the background.

Items of a step: `policy` and `value` (parameters), `policy_optimizer` and
`value_optimizer` (optimizer state and counters), `meta` (JSON: step, version,
data position). Items are read apart from each other, so evaluation and
export read the policy alone. Shardings come from the reader: a checkpoint
written on one mesh is restored onto any other.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_llm.digest import path_name
from jaxrl_llm.errors import InputError, TrainingStopped

_FORMAT = 3  # Of the items and of meta; another number is refused.


class _NewestAndBest:
  """Which steps stay, in the form of Orbax's preservation policies."""

  def __init__(self, keep, best):
    self._keep, self._best = keep, best

  def should_preserve(self, checkpoints, *, context):
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    kept = {*sorted(steps)[-self._keep :], self._best(steps)}
    return [step in kept for step in steps]


class Checkpointer:
  """Saves and restores the newest steps, and the best, under one directory."""

  def __init__(
    self,
    directory: str | os.PathLike,
    *,
    keep: int,
    best: Callable[[list[int]], int | None] = lambda steps: None,
  ):
    """Opens (and creates) the directory.

    Args:
      directory: where the steps live.
      keep: newest steps kept.
      best: (steps) -> one that is kept beside them, or None.
    """
    self._directory = pathlib.Path(directory).absolute()
    self._manager = ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=_NewestAndBest(keep, best),
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
      ),
    )

  def latest_step(self) -> int | None:
    """Newest complete step, None if there is none."""
    return self._manager.latest_step()

  def reload(self) -> None:
    """Looks at the directory again, of which steps were taken away."""
    self._manager.reload()

  def save(
    self, step: int, trees: Mapping[str, Any], meta: Mapping[str, Any]
  ) -> None:
    """Starts writing a step; the arrays may be donated right afterwards.

    Args:
      step: number of the step; saving it twice is an error.
      trees: name -> tree of arrays.
      meta: JSON-able numbers and strings.

    Raises:
      TrainingStopped: this save or one before it failed.
    """
    items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    meta = dict(meta) | {"format": _FORMAT}
    items["meta"] = ocp.args.JsonSave(meta)
    with _writable(self._directory):
      self._manager.save(step, args=ocp.args.Composite(**items))

  def restore(self, step: int, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Reads some trees of a step, and no bytes of the others.

    Args:
      step: which step.
      targets: name -> tree of ShapeDtypeStructs with shardings.

    Returns:
      name -> tree like its target.

    Raises:
      InputError: the step cannot be read, or has other shapes.
    """
    where = self._directory / str(step)
    items = {
      name: ocp.args.StandardRestore(tree) for name, tree in targets.items()
    }
    with _readable(where):
      for name, tree in targets.items():
        _check_shapes(where / name, tree)
      out = self._manager.restore(step, args=ocp.args.Composite(**items))
    return {name: out[name] for name in targets}

  def restore_meta(self, step: int) -> dict[str, Any]:
    """The meta item of a step.

    Raises:
      InputError: it cannot be read or was written by another version.
    """
    where = self._directory / str(step)
    with _readable(where):
      args = ocp.args.Composite(meta=ocp.args.JsonRestore())
      meta = self._manager.restore(step, args=args)["meta"]
      if meta["format"] != _FORMAT:
        raise InputError(
          f"{where}: checkpoint format {meta['format']}, but this version of"
          f" jaxrl_llm reads {_FORMAT}; use the version that wrote it, or"
          " another --workdir"
        )
    return meta

  def wait(self) -> None:
    """Blocks until everything started is on disk.

    Raises:
      TrainingStopped: a save failed.
    """
    with _writable(self._directory):
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits and releases the directory; raises as `wait` does."""
    with _writable(self._directory):
      self._manager.close()


def save_tree(path: str | os.PathLike, tree: Any) -> None:
  """Writes one tree of arrays to a directory of its own, replacing it."""
  with _writable(path), ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(pathlib.Path(path).absolute(), tree, force=True)


def load_tree(path: str | os.PathLike, target: Any) -> Any:
  """Reads a tree written by `save_tree`.

  Args:
    path: its directory.
    target: tree of ShapeDtypeStructs with shardings.

  Raises:
    InputError: missing, damaged or of other shapes.
  """
  path = pathlib.Path(path).absolute()
  if not path.is_dir():
    raise InputError(f"{path}: no such checkpoint; check the path")
  with _readable(path), ocp.StandardCheckpointer() as checkpointer:
    _check_shapes(path, target)
    return checkpointer.restore(path, target)


def _check_shapes(path: pathlib.Path, target: Any) -> None:
  """Raises InputError naming a leaf that was saved otherwise or not at all."""
  leaves = jax.tree_util.tree_leaves_with_path
  saved = leaves(ocp.StandardCheckpointHandler().metadata(path).tree)
  shapes = {path_name(key): leaf.shape for key, leaf in saved}
  for key, leaf in leaves(target):
    name = path_name(key)
    if shapes.get(name) != leaf.shape:
      raise InputError(
        f"{path}: {name} has shape {shapes.get(name)}, but this model needs"
        f" {leaf.shape}; use the model it was saved from or another --workdir"
      )


def _readable(path: str | os.PathLike) -> Any:
  todo = "use another step or another --workdir"
  return _explained(InputError, f"{path}: cannot restore this checkpoint", todo)


def _writable(path: str | os.PathLike) -> Any:
  todo = "make room; the same --workdir goes on from the last complete one"
  return _explained(TrainingStopped, f"{path}: cannot write a checkpoint", todo)


@contextlib.contextmanager
def _explained(kind: type, what: str, todo: str) -> Iterator[None]:
  """Turns whatever goes wrong into one line."""
  try:
    yield
  except InputError:
    raise
  except Exception as error:  # Of Orbax or of what it is made of.
    # It explains over many lines. The first begins with what and ends with why.
    reason = next(iter(str(error).strip().splitlines()), "")
    if len(reason) > 200:
      reason = f"{reason[:100]} ... {reason[-100:]}"
    raise kind(f"{what} ({type(error).__name__}: {reason}); {todo}") from error
