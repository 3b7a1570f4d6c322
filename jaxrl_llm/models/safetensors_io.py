"""Reading and writing one safetensors file, trusting nothing in it.

A file is: 8 bytes little-endian header length, a JSON header, the data. Every
claim of the header is checked against the file before any tensor is read, so
that a damaged or hostile file costs neither memory nor a wrong weight.
"""

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxrl_llm.errors import InputError

MAX_JSON_BYTES = 32 * 1024 * 1024  # Real headers stay under a tenth of this.

# Name in the file -> bytes per element and the NumPy type, None where the
# format knows the type and this library has no use for it.
_DTYPES = {
  "BOOL": (1, None),
  "U8": (1, None),
  "I8": (1, None),
  "F8_E5M2": (1, None),
  "F8_E4M3": (1, None),
  "I16": (2, None),
  "U16": (2, None),
  "F16": (2, np.dtype(np.float16)),
  "BF16": (2, np.dtype(ml_dtypes.bfloat16)),
  "I32": (4, None),
  "U32": (4, None),
  "F32": (4, np.dtype(np.float32)),
  "F64": (8, np.dtype(np.float64)),
  "I64": (8, None),
  "U64": (8, None),
}
_NAMES = {dtype: name for name, (_, dtype) in _DTYPES.items() if dtype}


class Tensor(NamedTuple):
  """Where a tensor lies in its file."""

  path: pathlib.Path
  dtype: str  # The file's name of it, such as 'BF16'.
  shape: tuple[int, ...]
  start: int  # Bytes from the beginning of the file.
  size: int  # Bytes.


def parse_json(data: bytes, where: Any) -> dict[str, Any]:
  """Parses an untrusted JSON object; a key given twice is an error."""
  try:
    values = json.loads(
      data.decode("utf-8"),
      object_pairs_hook=_unique_keys,
      parse_constant=_refuse_constant,
    )
  except RecursionError:
    raise InputError(
      f"{where}: JSON is nested too deeply; get the file again"
    ) from None
  except ValueError as error:
    reason = " ".join(str(error).split())[:120]
    raise InputError(
      f"{where}: not valid JSON ({reason}); get the file again"
    ) from None
  if not isinstance(values, dict):
    raise InputError(f"{where}: must hold a JSON object; get the file again")
  return values


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) != len(pairs):
    seen = set()
    for key, _ in pairs:
      if key in seen:
        raise ValueError(f"key {key[:60]!r} appears twice")
      seen.add(key)
  return values


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is not a JSON number")


def read_header(path: pathlib.Path) -> dict[str, Tensor]:
  """Reads and checks the header of a safetensors file.

  Args:
    path: the file.

  Returns:
    Name -> Tensor. The tensors lie one after another and fill the file.

  Raises:
    InputError: the file is cut, or its header is not a sound one.
  """
  try:
    file_size = path.stat().st_size
    with path.open("rb") as file:
      prefix = file.read(8)
      length = int.from_bytes(prefix, "little")
      if len(prefix) < 8 or length > file_size - 8:
        raise _damaged(path, "it ends before its header does")
      if length > MAX_JSON_BYTES:
        raise _damaged(path, f"its header claims {length} bytes")
      data = file.read(length)
  except OSError as error:
    raise InputError(f"{path}: cannot be read ({error.strerror})") from None
  if not data.startswith(b"{"):
    raise _damaged(path, "its header is not a JSON object")
  entries = parse_json(data, path)
  metadata = entries.pop("__metadata__", {})
  if not isinstance(metadata, dict) or not all(
    isinstance(value, str) for value in metadata.values()
  ):
    raise _damaged(path, "its metadata are not strings")
  tensors = {
    name: _tensor(path, name, entry, 8 + length)
    for name, entry in entries.items()
  }
  _check_layout(path, tensors, 8 + length, file_size)
  return tensors


def _damaged(path: pathlib.Path, what: str) -> InputError:
  return InputError(
    f"{path}: damaged safetensors file, {what}; get the file again"
  )


def _is_size(value: Any) -> bool:
  return type(value) is int and 0 <= value < 1 << 62


def _tensor(path: pathlib.Path, name: str, entry: Any, base: int) -> Tensor:
  """Checks one entry of the header by itself."""
  label = f"tensor {name[:80]!r}"
  if not isinstance(entry, dict) or set(entry) != {
    "dtype",
    "shape",
    "data_offsets",
  }:
    raise _damaged(path, f"{label} lacks dtype, shape or data_offsets")
  dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
  if not isinstance(dtype, str) or dtype not in _DTYPES:
    raise _damaged(path, f"{label} has an unknown dtype")
  if (
    not isinstance(shape, list)
    or len(shape) > 8
    or not all(map(_is_size, shape))
  ):
    raise _damaged(path, f"{label} has no proper shape")
  if (
    not isinstance(offsets, list)
    or len(offsets) != 2
    or not all(map(_is_size, offsets))
    or offsets[0] > offsets[1]
  ):
    raise _damaged(path, f"{label} has no proper data_offsets")
  size = offsets[1] - offsets[0]
  if math.prod(shape) * _DTYPES[dtype][0] != size:
    raise _damaged(path, f"{label} has other bytes than its shape needs")
  return Tensor(path, dtype, tuple(shape), base + offsets[0], size)


def _check_layout(
  path: pathlib.Path, tensors: dict[str, Tensor], base: int, file_size: int
) -> None:
  """Tensors must fill the data without overlap, hole or remainder."""
  end = base
  by_place = sorted(tensors.items(), key=lambda item: item[1][3:])
  for name, tensor in by_place:
    if tensor.start != end:
      kind = "overlaps another" if tensor.start < end else "follows a hole"
      raise _damaged(path, f"tensor {name[:80]!r} {kind}")
    end += tensor.size
  if end != file_size:
    raise _damaged(path, f"it has {file_size} bytes where {end} are described")


def read_tensor(name: str, tensor: Tensor) -> np.ndarray:
  """Reads one floating-point tensor into memory.

  Raises:
    InputError: the tensor is not floating point, or the file changed.
  """
  dtype = _DTYPES[tensor.dtype][1]
  if dtype is None:
    raise InputError(
      f"{tensor.path}: tensor {name!r} is {tensor.dtype}, which is not"
      f" supported; use weights in {', '.join(_NAMES.values())}"
    )
  array = np.empty(tensor.shape, dtype)
  try:
    with tensor.path.open("rb", buffering=0) as file:
      file.seek(tensor.start)
      count = _read_fully(file, memoryview(array.reshape(-1).view(np.uint8)))
  except OSError as error:
    raise InputError(
      f"{tensor.path}: cannot be read ({error.strerror})"
    ) from None
  if count != tensor.size:
    raise _damaged(tensor.path, "it became shorter while it was read")
  return array


def _read_fully(file: Any, buffer: memoryview) -> int:
  """A raw read may return less than asked for (Linux stops at 2 GiB)."""
  done = 0
  while done < len(buffer):
    count = file.readinto(buffer[done:])
    if not count:
      break
    done += count
  return done


class Entry(NamedTuple):
  """A tensor to write; its data are made only when its turn comes."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]
  load: Callable[[], np.ndarray]

  @property
  def size(self) -> int:
    """Bytes."""
    return math.prod(self.shape) * self.dtype.itemsize


def can_write(dtype: Any) -> bool:
  """Whether the dtype is one of the four that files of weights use."""
  return np.dtype(dtype) in _NAMES


def write_file(path: pathlib.Path, entries: Iterable[Entry]) -> None:
  """Writes a safetensors file, holding one tensor in memory at a time."""
  header, end = {"__metadata__": {"format": "pt"}}, 0
  entries = list(entries)
  for entry in entries:
    header[entry.name] = {
      "dtype": _NAMES[np.dtype(entry.dtype)],
      "shape": list(entry.shape),
      "data_offsets": [end, end + entry.size],
    }
    end += entry.size
  data = json.dumps(header, separators=(",", ":")).encode()
  # Data start at a multiple of 8, so that a reader may map them into memory.
  data += b" " * (-len(data) % 8)
  with path.open("wb") as file:
    file.write(len(data).to_bytes(8, "little") + data)
    for entry in entries:
      array = np.ascontiguousarray(entry.load(), entry.dtype)
      file.write(memoryview(array.reshape(-1).view(np.uint8)))
    file.flush()
    os.fsync(file.fileno())
