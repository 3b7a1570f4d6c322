"""Values as JSON text, which processes send to each other.

Unlike a pickle, a message cannot run code: it has plain values, arrays, and
records and errors of this package.
"""

import base64
import dataclasses
import importlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

_PACKAGE = __name__.partition(".")[0] + "."
_KINDS: dict[str, Callable[[Any], Any]] = {
  "tuple": tuple,
  "set": set,
  "dict": dict,
  "bytes": base64.b64decode,
  "path": pathlib.Path,
  "array": lambda x: _array(*x),
  "made": lambda x: _made(*x),
}


def dumps(value: Any) -> bytes:
  """Returns a message.

  Raises:
    TypeError: The value cannot be sent.
  """
  return json.dumps(_encoded(value)).encode()


def loads(message: bytes) -> Any:
  """Returns the value of a message.

  Raises:
    ValueError: It is no message of `dumps`.
  """
  return _decoded(json.loads(message))


def _encoded(value: Any) -> Any:
  """Returns a value as JSON; those that it lacks become {kind: content}."""
  kind = type(value)
  if value is None or kind in (bool, int, float, str):
    return value
  if kind is list:
    return [_encoded(x) for x in value]
  if kind in (tuple, set):
    return {kind.__name__: [_encoded(x) for x in value]}
  if kind is dict:
    return {"dict": [_encoded([*pair]) for pair in value.items()]}
  if kind is bytes:
    return {"bytes": base64.b64encode(value).decode()}
  if isinstance(value, pathlib.Path):
    return {"path": str(value)}
  if isinstance(value, (np.ndarray, np.generic)):
    data = base64.b64encode(np.asarray(value).tobytes()).decode()
    return {"array": [str(value.dtype), list(value.shape), data]}
  if dataclasses.is_dataclass(value):
    content = [getattr(value, field.name) for field in dataclasses.fields(kind)]
  elif isinstance(value, tuple):  # A named one.
    content = [*value]
  elif isinstance(value, Exception):
    content = value.__reduce__()[1]
  else:
    raise TypeError(f"cannot send a {kind.__name__} to another process")
  content = [_encoded(x) for x in content]
  return {"made": [kind.__module__, kind.__qualname__, content]}


def _decoded(value: Any) -> Any:
  if isinstance(value, list):
    return [_decoded(x) for x in value]
  if isinstance(value, dict):
    ((kind, content),) = value.items()
    return _KINDS[kind](_decoded(content))
  return value


def _array(dtype: str, shape: list[int], data: str) -> np.ndarray:
  flat = np.frombuffer(base64.b64decode(data), np.dtype(dtype))
  return flat.reshape(shape).copy()


def _made(module: str, name: str, content: list[Any]) -> Any:
  """Makes a record or an error of this package, or an OSError."""
  if (module, name) == ("builtins", "OSError"):
    return OSError(*content)
  if not module.startswith(_PACKAGE):
    raise ValueError(f"a message has a {module}.{name}")
  kind = getattr(importlib.import_module(module), name)
  record = isinstance(kind, type) and (
    issubclass(kind, (Exception, tuple)) or dataclasses.is_dataclass(kind)
  )
  if not record:
    raise ValueError(f"a message has a {module}.{name}")
  return kind(*content)
