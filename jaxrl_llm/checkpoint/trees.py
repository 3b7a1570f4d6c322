"""Trees of arrays in a folder, written and read with Orbax.

With several processes, only those with devices in the arrays' mesh read and
write; host arrays are the same in all processes.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from jaxrl_llm import digest
from jaxrl_llm.checkpoint import commit
from jaxrl_llm.errors import TrainingStopped, advice
from jaxrl_llm.system import processes

_TREE = "tree"  # The item of `save_tree`.
T = TypeVar("T")


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
  members, failed = members_of(trees), None
  if jax.process_index() in members:
    with make(ocp.Checkpointer, members) as checkpointer:
      try:
        checkpointer.save(path, to_save(trees, members), force=True)
      except Exception as error:  # Orbax raises errors of many kinds.
        failed = f"({reason(error)}); {advice(error, 'check the disk')}"
  if failures := list(filter(None, processes.gather(failed))):
    raise TrainingStopped(
      f"{path}: cannot write a checkpoint {failures[0]} and resume with the"
      " same --workdir"
    )
  leaves, checksums = commit.describe(trees), digest.checksums(trees)
  write = functools.partial(commit.write, bytes=commit.num_bytes(trees))
  processes.of_first(write, path, leaves, checksums)


def load_tree(path: str | os.PathLike, target: Any) -> Any:
  """Reads a tree written by `save_tree`.

  Args:
    path: directory of the tree.
    target: tree of ShapeDtypeStructs with shardings.

  Raises:
    InputError: it is missing or damaged, or has other shapes.
  """
  return load(path, {_TREE: target})[_TREE]


def load(path: str | os.PathLike, targets: Mapping[str, Any]) -> dict[str, Any]:
  """Reads some items of a checkpoint without reading the others.

  Args:
    path: folder of the checkpoint.
    targets: name -> tree of ShapeDtypeStructs with shardings.

  Returns:
    name -> tree like its target.

  Raises:
    DamagedError: The data differ from what was saved.
    InputError: The checkpoint does not exist or has other shapes.
    TrainingStopped: A process does not see a file that the first one sees.
  """
  path = pathlib.Path(path).absolute()
  record = processes.of_first(commit.read, path)
  processes.await_files(path)
  commit.check_shapes(path, record, targets)
  items = {
    name: ocp.args.PyTreeRestore(
      tree,
      restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
      partial_restore=True,  # An item may contain more.
    )
    for name, tree in targets.items()
  }
  members = members_of(targets)
  try:
    trees = dict(targets)
    if jax.process_index() in members:
      with make(ocp.Checkpointer, members) as checkpointer:
        found = checkpointer.restore(path, ocp.args.Composite(**items))
      trees = {name: found[name] for name in targets}
      if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(trees)):
        raise ValueError("an array is missing")
    failed = None
  except Exception as error:  # Orbax raises errors of many kinds.
    failed = reason(error)
  if failures := list(filter(None, processes.gather(failed))):
    raise commit.DamagedError(path, failures[0])
  if jax.process_count() > 1:
    trees = _completed(trees)
  commit.check_bits(path, record, trees)
  return trees


def load_whole(path: pathlib.Path, prefix: str = "") -> dict[str, Any]:
  """Reads items of a checkpoint without knowing their structure.

  Args:
    path: folder of the checkpoint.
    prefix: prefix of the items' names.

  Returns:
    name -> NumPy arrays in nested dicts and lists.

  Raises:
    InputError: It is missing or damaged.
  """
  record = commit.read(path)
  names = sorted({name.split("/")[0] for name in record["leaves"]})
  trees = {n: load_item(path / n) for n in names if n.startswith(prefix)}
  commit.check_bits(path, record, trees)
  return trees


def load_item(path: pathlib.Path) -> Any:
  """Reads an item written by Orbax, from this package or another."""
  path = path.absolute()
  tree = ocp.PyTreeCheckpointHandler().metadata(path).tree
  to_host = lambda _: ocp.RestoreArgs(restore_type=np.ndarray)
  with ocp.PyTreeCheckpointer() as checkpointer:
    return checkpointer.restore(path, restore_args=jax.tree.map(to_host, tree))


def members_of(trees: Mapping[str, Any]) -> set[int]:
  """Returns the processes with devices of the arrays; all if on no mesh."""
  inside = {
    device.process_index
    for leaf in jax.tree.leaves(trees)
    if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    for device in leaf.sharding.device_set
  }
  return inside or {*range(jax.process_count())}


def make(kind: Callable[..., T], members: set[int]) -> T:
  """Makes an Orbax checkpointer for some of the processes."""
  everyone = len(members) == jax.process_count()
  options = ocp.options.MultiprocessingOptions(
    active_processes=None if everyone else members
  )
  handler = ocp.CompositeCheckpointHandler(
    composite_options=ocp.CompositeOptions(multiprocessing_options=options)
  )
  return kind(handler, multiprocessing_options=options)


def to_save(trees: Mapping[str, Any], members: set[int]) -> Any:
  """Returns the arguments of an Orbax save."""
  if len(members) == 1 < jax.process_count():
    # Orbax rejects device arrays that only one of several processes has.
    trees = jax.device_get(trees)
  items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
  return ocp.args.Composite(**items)


def _completed(trees: Mapping[str, Any]) -> dict[str, Any]:
  """Makes restored trees the same in all processes, even in those without any.

  Host arrays come from the first process as NumPy arrays: on a device they
  would be mistaken for arrays that only one process has. Arrays whose mesh has
  no device of this process hold no data here.
  """
  leaves, structure = jax.tree.flatten(dict(trees))
  on_mesh = [isinstance(x.sharding, NamedSharding) for x in leaves]
  read = lambda: [None if y else np.asarray(x) for x, y in zip(leaves, on_mesh)]
  for i, value in enumerate(processes.of_first(read)):
    if value is not None:
      leaves[i] = value
    elif isinstance(leaves[i], jax.ShapeDtypeStruct):
      shape, place, dtype = leaves[i].shape, leaves[i].sharding, leaves[i].dtype
      leaves[i] = jax.make_array_from_single_device_arrays(
        shape, place, [], dtype=dtype
      )
  return jax.tree.unflatten(structure, leaves)


def reason(error: BaseException) -> str:
  """Returns the first line of an error, shortened in the middle."""
  reason = next(iter(str(error).strip().splitlines()), "")
  if len(reason) > 200:
    reason = f"{reason[:100]} ... {reason[-100:]}"
  return f"{type(error).__name__}: {reason}"
