"""Converts states to checkpoint items and back by one generic traversal.

A state is a frozen dataclass, or a dict or tuple of them. Numbers and strings,
and dicts of them, become metadata. Each tree of arrays becomes an item named by
its path of fields, so that items can be read separately. A record of host
arrays (`Rollout`, `Responses`) is an item whose shapes are in the metadata.

A new field of a state therefore only needs its declaration. A field with the
metadata `constant` is not stored, and the entries of a dict with `inline` are
stored as if they were fields.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import InputError

_SIMPLE = (bool, int, float, str, type(None))


def to_items(
  states: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Converts states to trees of arrays and metadata, by path.

  Args:
    states: name -> state.

  Returns:
    (path -> tree, path -> JSON-able value). The metadata of a record of host
    arrays is its leaves' shapes and dtypes.
  """
  trees, values = {}, {}
  for path, part in _parts(states).items():
    if _is_plain(part):
      values[path] = part
    elif _is_record(part):
      trees[path] = _as_dict(part)
      values[path] = jax.tree.map(
        lambda x: {"shape": list(np.shape(x)), "dtype": str(x.dtype)},
        trees[path],
      )
    else:
      trees[path] = part
  return trees, values


def targets(
  abstract: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the items to read: path -> tree of ShapeDtypeStructs.

  Args:
    abstract: name -> state with ShapeDtypeStructs instead of arrays, and the
      class instead of each record of host arrays.
    values: metadata of the checkpoint.

  Raises:
    InputError: The checkpoint lacks a part of the state, or vice versa.
  """
  here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  on_host = functools.partial(jax.ShapeDtypeStruct, sharding=here)
  is_shape = lambda x: set(x) == {"shape", "dtype"}
  found = {}

  def target(x: Any):
    placed = isinstance(x, jax.ShapeDtypeStruct)
    return x if placed else on_host(x.shape, x.dtype)

  for path, part in _parts(abstract).items():
    for outer in itertools.accumulate(path.split(".")[:-1], "{}.{}".format):
      if values.get(outer, outer) is None:
        raise _other_parts(outer)
    if isinstance(part, type):  # A record, which may be absent.
      if values.get(path) is not None:
        found[path] = jax.tree.map(
          lambda x: on_host(**x), values[path], is_leaf=is_shape
        )
    elif _is_plain(part):
      if path not in values or (part is None) != (values[path] is None):
        raise _other_parts(path)
    elif path in values:
      raise _other_parts(path)
    else:
      found[path] = jax.tree.map(target, part)
  return found


def from_items(
  abstract: Mapping[str, Any],
  trees: Mapping[str, Any],
  values: Mapping[str, Any],
) -> dict[str, Any]:
  """Builds states from their parts; arguments as in `targets`."""

  def read(path: str, part: Any):
    if isinstance(part, type):
      tree = trees.get(path)
      return None if tree is None else _from_dict(part, jax.device_get(tree))
    if _is_plain(part):
      return values[path]
    on_host = isinstance(jax.tree.leaves(part)[0], np.ndarray)
    return jax.device_get(trees[path]) if on_host else trees[path]

  return {name: _map(read, name, state) for name, state in abstract.items()}


def _parts(states: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the parts of states by path."""
  parts = {}

  def collect(path: str, part: Any):
    parts[path] = part

  for name, state in states.items():
    _map(collect, name, state)
  return parts


def _map(function: Callable[[str, Any], Any], path: str, state: Any) -> Any:
  """Maps function(path, part) over the parts of a state."""
  if type(state) is tuple and all(map(dataclasses.is_dataclass, state)):
    return tuple(
      _map(function, f"{path}.{i}", inner) for i, inner in enumerate(state)
    )
  whole = isinstance(state, type) or not dataclasses.is_dataclass(state)
  if whole or _is_record(state):
    return function(path, state)
  parts = {}
  for field in dataclasses.fields(state):
    value, metadata = getattr(state, field.name), field.metadata
    if metadata.get("inline"):
      parts[field.name] = {
        name: _map(function, f"{path}.{name}", x) for name, x in value.items()
      }
    elif not metadata.get("constant"):
      parts[field.name] = _map(function, f"{path}.{field.name}", value)
  return dataclasses.replace(state, **parts)


def _is_plain(value: Any) -> bool:
  """Returns whether a value is a number or string, or a dict of them."""
  if isinstance(value, dict):
    return all(isinstance(x, _SIMPLE) for x in value.values())
  return isinstance(value, _SIMPLE)


def _is_record(value: Any) -> bool:
  """Returns whether a value is a dataclass of host arrays only."""
  return dataclasses.is_dataclass(value) and all(
    isinstance(x, np.ndarray) for x in jax.tree.leaves(value)
  )


def _as_dict(record: Any) -> dict[str, Any]:
  """Converts a record to nested dicts, as stored in a checkpoint."""
  return {
    field.name: _as_dict(inner) if dataclasses.is_dataclass(inner) else inner
    for field in dataclasses.fields(record)
    for inner in [getattr(record, field.name)]
    # Orbax has no empty trees.
    if not (inner is None or (isinstance(inner, dict) and not inner))
  }


def _from_dict(kind: type, tree: Any) -> Any:
  if not dataclasses.is_dataclass(kind):
    return tree
  fields = {field.name: field.type for field in dataclasses.fields(kind)}
  return kind(**{k: _from_dict(fields[k], x) for k, x in tree.items()})


def _other_parts(path: str) -> InputError:
  return InputError(
    f"only one of the checkpoint and this run has {path}; use the checkpoint's"
    " settings or another --workdir"
  )
