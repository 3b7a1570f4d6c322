"""States as checkpoints: one walk that saves any of them and finds it again.

A state is a frozen dataclass, or several by name or in a tuple. Its numbers and
texts, and tables of them, become metadata; a tree of arrays becomes an item of
its own, named by the path of fields that leads to it, so that items can be read
apart. A record of host arrays (`Rollout`, `Responses`) is an item too, and the
metadata has its shapes.
A new field of a state is thus written in one place, where it is declared.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import InputError

_SIMPLE = (bool, int, float, str, type(None))


def to_items(
  states: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Trees of arrays and metadata by path.

  Args:
    states: name -> state.

  Returns:
    (path -> tree, path -> JSON-able value). The metadata of a record of host
    arrays is its leaves' shapes and dtypes.
  """
  trees, values = {}, {}

  def walk(path, value):
    if _is_plain(value):
      values[path] = value
    elif _is_row(value):
      for i, inner in enumerate(value):
        walk(f"{path}.{i}", inner)
    elif _is_record(value):
      trees[path] = _as_dict(value)
      values[path] = jax.tree.map(
        lambda x: {"shape": list(np.shape(x)), "dtype": str(x.dtype)},
        trees[path],
      )
    elif dataclasses.is_dataclass(value):
      for field in dataclasses.fields(value):
        walk(f"{path}.{field.name}", getattr(value, field.name))
    else:
      trees[path] = value

  for name, state in states.items():
    walk(name, state)
  return trees, values


def targets(
  abstract: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
  """What to read of a checkpoint: path -> tree of ShapeDtypeStructs.

  Args:
    abstract: name -> state with ShapeDtypeStructs in place of arrays, and the
      class of a record of host arrays in its place.
    values: metadata of the checkpoint.

  Raises:
    InputError: the checkpoint lacks a part that the state has, or the reverse.
  """
  here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  found = {}

  def walk(path, value):
    if isinstance(value, type):  # Of a record, which may be absent.
      if values.get(path) is not None:
        found[path] = jax.tree.map(
          lambda x: jax.ShapeDtypeStruct(
            tuple(x["shape"]), np.dtype(x["dtype"]), sharding=here
          ),
          values[path],
          is_leaf=lambda x: set(x) == {"shape", "dtype"},
        )
    elif _is_row(value):
      for i, inner in enumerate(value):
        walk(f"{path}.{i}", inner)
    elif _is_plain(value):
      if path not in values or (value is None) != (values[path] is None):
        raise _other_parts(path)
    elif dataclasses.is_dataclass(value):
      if values.get(path, path) is None:
        raise _other_parts(path)
      for field in dataclasses.fields(value):
        walk(f"{path}.{field.name}", getattr(value, field.name))
    else:
      if path in values:
        raise _other_parts(path)
      found[path] = jax.tree.map(
        lambda x: (
          x
          if isinstance(x, jax.ShapeDtypeStruct)
          else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
        ),
        value,
      )

  for name, state in abstract.items():
    walk(name, state)
  return found


def from_items(
  abstract: Mapping[str, Any],
  trees: Mapping[str, Any],
  values: Mapping[str, Any],
) -> dict[str, Any]:
  """The states whose parts are given; arguments as of `targets`."""

  def build(path, value):
    if isinstance(value, type):
      tree = trees.get(path)
      return None if tree is None else _from_dict(value, jax.device_get(tree))
    if _is_row(value):
      return tuple(build(f"{path}.{i}", x) for i, x in enumerate(value))
    if _is_plain(value):
      return values[path]
    if dataclasses.is_dataclass(value):
      return dataclasses.replace(
        value,
        **{
          field.name: build(f"{path}.{field.name}", getattr(value, field.name))
          for field in dataclasses.fields(value)
        },
      )
    on_host = isinstance(jax.tree.leaves(value)[0], np.ndarray)
    return jax.device_get(trees[path]) if on_host else trees[path]

  return {name: build(name, state) for name, state in abstract.items()}


def _is_plain(value: Any) -> bool:
  """Whether it is a number or text, or a table of them."""
  if isinstance(value, dict):
    return all(isinstance(x, _SIMPLE) for x in value.values())
  return isinstance(value, _SIMPLE)


def _is_row(value: Any) -> bool:
  """Whether it is a tuple of states."""
  return type(value) is tuple and all(map(dataclasses.is_dataclass, value))


def _is_record(value: Any) -> bool:
  """Whether it is a dataclass of host arrays alone."""
  return dataclasses.is_dataclass(value) and all(
    isinstance(x, np.ndarray) for x in jax.tree.leaves(value)
  )


def _as_dict(record: Any) -> dict[str, Any]:
  """Nested plain dicts, which is what a checkpoint holds."""
  return {
    field.name: _as_dict(inner) if dataclasses.is_dataclass(inner) else inner
    for field in dataclasses.fields(record)
    for inner in [getattr(record, field.name)]
    if not isinstance(inner, dict)  # Parts of rewards: they have been told.
  }


def _from_dict(record: type, tree: Mapping[str, Any]) -> Any:
  fields = {f.name: f.type for f in dataclasses.fields(record)}
  return record(
    **{
      name: _from_dict(fields[name], x) if isinstance(x, Mapping) else x
      for name, x in tree.items()
    }
  )


def _other_parts(path: str) -> InputError:
  return InputError(
    f"the checkpoint and this run differ in {path}: one of them has none; use"
    " the settings it was saved with or another --workdir"
  )
