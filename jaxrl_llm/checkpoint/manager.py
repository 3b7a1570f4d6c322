"""Checkpoints with Orbax: items side by side, written in the background.

Items of a step: `policy` and `value` (parameters), `policy_optimizer` and
`value_optimizer` (optimizer state and counters), `meta` (JSON: step, version,
data position, seed). Items are read apart from each other, so evaluation and
export read the policy alone. Shardings come from the reader: a checkpoint
written on one mesh is restored onto any other.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_llm.errors import InputError

_FORMAT = 1  # Of the items and of meta; a newer number is refused.


class Checkpointer:
  """Saves and restores the newest steps under one directory."""

  def __init__(self, directory: str | os.PathLike, *, keep: int):
    """Opens (and creates) the directory.

    Args:
      directory: where the steps live.
      keep: newest steps kept.
    """
    self._directory = pathlib.Path(directory).absolute()
    self._manager = ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
      ),
    )

  def latest_step(self) -> int | None:
    """Newest complete step, None if there is none."""
    return self._manager.latest_step()

  def save(
    self, step: int, trees: Mapping[str, Any], meta: Mapping[str, Any]
  ) -> None:
    """Starts writing a step; the arrays may be donated right afterwards.

    Args:
      step: number of the step; saving it twice is an error.
      trees: name -> tree of arrays.
      meta: JSON-able numbers and strings.
    """
    items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    meta = dict(meta) | {"format": _FORMAT}
    items["meta"] = ocp.args.JsonSave(meta)
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
    items = {
      name: ocp.args.StandardRestore(tree) for name, tree in targets.items()
    }
    try:
      out = self._manager.restore(step, args=ocp.args.Composite(**items))
    except (ValueError, KeyError, OSError) as error:
      raise InputError(
        _unreadable(self._directory / str(step), error)
      ) from error
    return {name: out[name] for name in targets}

  def restore_meta(self, step: int) -> dict[str, Any]:
    """The meta item of a step.

    Raises:
      InputError: it cannot be read or was written by a newer version.
    """
    where = self._directory / str(step)
    try:
      args = ocp.args.Composite(meta=ocp.args.JsonRestore())
      meta = self._manager.restore(step, args=args)["meta"]
    except (ValueError, KeyError, OSError) as error:
      raise InputError(_unreadable(where, error)) from error
    if meta["format"] > _FORMAT:
      raise InputError(
        f"{where}: checkpoint format {meta['format']} is newer than this"
        f" version reads ({_FORMAT}); update jaxrl_llm"
      )
    return meta

  def wait(self) -> None:
    """Blocks until everything started is on disk; raises what went wrong."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits and releases the directory."""
    self._manager.close()


def save_tree(path: str | os.PathLike, tree: Any) -> None:
  """Writes one tree of arrays to a directory of its own, replacing it."""
  with ocp.StandardCheckpointer() as checkpointer:
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
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      return checkpointer.restore(path, target)
  except (ValueError, KeyError, OSError) as error:
    raise InputError(_unreadable(path, error)) from error


def abstract(tree: Any, shardings: Any) -> Any:
  """ShapeDtypeStructs of a tree, with the given shardings."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    tree,
    shardings,
  )


def _unreadable(path: pathlib.Path, error: Exception) -> str:
  # Orbax and TensorStore explain over many lines; the first one tells what.
  reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
  return (
    f"{path}: cannot restore this checkpoint ({reason[:200]}); use another"
    " step or another --workdir"
  )
