"""Values as JSON text, which processes send to each other.

Unlike a pickle, a message cannot run code: it has plain values, arrays, and
records and errors of this package.
"""

import base64
import dataclasses
import importlib
import json
import pathlib
from typing import Any

import numpy as np

_PACKAGE = __name__.partition(".")[0] + "."
# Types that JSON lacks: kind -> (type, conversion to JSON, and back).
_KINDS = {
  "tuple": (tuple, list, tuple),
  "set": (set, list, set),
  "dict": (dict, lambda x: [*map(list, x.items())], dict),
  "bytes": (bytes, lambda x: base64.b64encode(x).decode(), base64.b64decode),
  "path": (pathlib.PosixPath, str, pathlib.Path),
  "array": (
    np.ndarray,
    lambda x: [str(x.dtype), list(x.shape), x.tobytes()],
    lambda x: np.frombuffer(bytearray(x[2]), np.dtype(x[0])).reshape(x[1]),
  ),
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
  if value is None or type(value) in (bool, int, float, str):
    return value
  if type(value) is list:
    return [_encoded(x) for x in value]
  value = np.asarray(value) if isinstance(value, np.generic) else value
  for kind, (own, content, _) in _KINDS.items():
    if type(value) is own:
      return {kind: _encoded(content(value))}
  return {"made": _encoded(_parts(value))}


def _parts(value: Any) -> list[Any]:
  """Returns module, name and arguments of a record or an error."""
  kind = type(value)
  if dataclasses.is_dataclass(kind):
    content = [getattr(value, field.name) for field in dataclasses.fields(kind)]
  elif isinstance(value, tuple):  # A named one.
    content = [*value]
  elif isinstance(value, Exception):
    content = [*value.__reduce__()[1]]
  else:
    raise TypeError(f"cannot send a {kind.__name__} to another process")
  return [kind.__module__, kind.__qualname__, content]


def _decoded(value: Any) -> Any:
  if isinstance(value, list):
    return [_decoded(x) for x in value]
  if isinstance(value, dict):
    ((kind, content),) = value.items()
    content = _decoded(content)
    return _made(*content) if kind == "made" else _KINDS[kind][2](content)
  return value


def _made(module: str, name: str, content: list[Any]) -> Any:
  """Makes a record or an error of this package, or an OSError."""
  kind = None
  if module.startswith(_PACKAGE):
    kind = getattr(importlib.import_module(module), name)
  if (module, name) == ("builtins", "OSError"):
    kind = OSError
  if not isinstance(kind, type) or not (
    dataclasses.is_dataclass(kind) or issubclass(kind, (Exception, tuple))
  ):
    raise ValueError(f"a message has a {module}.{name}")
  return kind(*content)
