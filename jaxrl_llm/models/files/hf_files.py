"""Files of a Hugging Face model directory, all treated as untrusted."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.system import files

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Buffers in old exports that every reader recomputes.
_HARMLESS = re.compile(r".*\brotary_emb\.inv_freq")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_FILE_NAME = re.compile(r"\w[\w.-]{0,254}", re.ASCII)
# Supported dtypes of weights by their names in safetensors files.
DTYPES = {
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F32": np.dtype(np.float32),
  "F64": np.dtype(np.float64),
}


Part = tuple[slice, ...]  # A slice for each dimension of an array.


class Tensor(NamedTuple):
  """A tensor of an open safetensors file, not read yet."""

  path: pathlib.Path
  name: str
  dtype: str  # Its name in the file, such as 'BF16'.
  shape: tuple[int, ...]
  file: safetensors.safe_open


def directory(path: str | os.PathLike[str]) -> pathlib.Path:
  """Checks that a directory exists and returns its path."""
  directory = pathlib.Path(path)
  if not directory.is_dir():
    raise InputError(
      f"{directory}: no such directory; give the directory of a downloaded"
      " model (`hf download MODEL --local-dir DIR` makes one)"
    )
  return directory


def member(directory: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the path of a regular file in the directory, or of a link to one.

  Links are followed because download caches consist of them.
  """
  if not _FILE_NAME.fullmatch(name):
    raise InputError(
      f"{directory}: {name[:80]!r} is not a plain file name; download the"
      " model again"
    )
  file = directory / name
  if not file.is_file():
    raise InputError(f"{file}: no such file; download the model again")
  return file


def read_json(file: pathlib.Path) -> dict[str, Any]:
  """Reads a file with one JSON object."""
  kinds = OSError, ValueError, RecursionError
  with as_input_error(
    f"{file}: cannot be read as JSON", "download it again", *kinds
  ):
    values = json.loads(file.read_text(encoding="utf-8"))
  if not isinstance(values, dict):
    raise InputError(f"{file}: must contain a JSON object; download it again")
  return values


def _read_header(path: pathlib.Path) -> dict[str, Tensor]:
  """Opens a safetensors file; the library checks its header and layout."""
  kinds = OSError, safetensors.SafetensorError
  what = f"{path}: cannot be read as safetensors"
  with as_input_error(what, "download it again", *kinds):
    file = safetensors.safe_open(path, framework="numpy")
  tensors = {}
  for name in file.keys():
    view = file.get_slice(name)
    shape = tuple(view.get_shape())
    tensors[name] = Tensor(path, name, view.get_dtype(), shape, file)
  return tensors


def read_tensor(tensor: Tensor, part: Part | None = None) -> np.ndarray:
  """Reads one floating-point tensor, or a part of it, into memory."""
  if tensor.dtype not in DTYPES:
    raise InputError(
      f"{tensor.path}: tensor {tensor.name!r} is {tensor.dtype}, which is not"
      f" supported; use weights in {', '.join(DTYPES)}"
    )
  if part is None:
    return tensor.file.get_tensor(tensor.name)
  return tensor.file.get_slice(tensor.name)[part]


def read_headers(
  directory: pathlib.Path,
) -> tuple[pathlib.Path, dict[str, Tensor]]:
  """Returns the file that lists the tensors, and the tensors by name."""
  if (directory / INDEX).exists():
    index = member(directory, INDEX)
    return index, _read_shards(index)
  if (directory / SINGLE).exists():
    single = member(directory, SINGLE)
    return single, _read_header(single)
  pickles = sorted(
    file.name for file in directory.iterdir() if file.suffix in _PICKLES
  )
  if pickles:
    raise InputError(
      f"{directory / pickles[0]}: pickled weights can run code and are not"
      " read; convert them to safetensors with the Hugging Face tools"
    )
  raise InputError(
    f"{directory / SINGLE}: no such file; download the model's safetensors"
    " weights"
  )


def _read_shards(index: pathlib.Path) -> dict[str, Tensor]:
  """Returns the tensors of all shards, which must match the index."""
  weight_map = read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not all(
    isinstance(shard, str) for shard in weight_map.values()
  ):
    raise InputError(
      f"{index}: key 'weight_map' must map tensor names to file names;"
      " download it again"
    )
  directory, shards = index.parent, sorted(set(weight_map.values()))
  if (directory / SINGLE).exists() and SINGLE not in shards:
    raise InputError(
      f"{directory}: contains both {SINGLE} and {INDEX}; remove the one that"
      " does not belong to this model"
    )
  tensors, found = {}, set()
  for shard in shards:
    header = _read_header(member(directory, shard))
    tensors |= header
    found |= {(name, shard) for name in header}
  for name, shard in sorted(found ^ set(weight_map.items())):
    if not _HARMLESS.fullmatch(name):
      raise InputError(
        f"{index}: tensor {name[:80]!r} must be both listed and stored in"
        f" {shard}; download the files again"
      )
  return tensors


def check_tensors(
  listing: pathlib.Path,
  tensors: Mapping[str, Tensor],
  shapes: Mapping[str, tuple[int, ...]],
) -> None:
  """Checks that names and shapes match the configuration exactly.

  Args:
    listing: the file that lists the tensors, for messages.
    tensors: tensors in the files, by name.
    shapes: shapes that the configuration requires, by tensor name.

  Raises:
    InputError: a tensor is missing, unexpected or of the wrong shape.
  """
  different = {
    name
    for name in shapes.keys() ^ tensors.keys()
    if not _HARMLESS.fullmatch(name)
  }
  # Some exports also write a tied head; it must equal the embedding.
  tied_head = different == {_HEAD} and _HEAD in tensors
  if different and not tied_head:
    name = min(different)
    problem = "is missing" if name in shapes else "is unexpected"
    raise InputError(
      f"{listing}: tensor {name[:80]!r} {problem} according to the"
      " configuration; use files of one model"
    )
  for name, shape in shapes.items():
    if tensors[name].shape != shape:
      raise InputError(
        f"{tensors[name].path}: tensor {name!r} has shape"
        f" {list(tensors[name].shape)}, but the configuration requires"
        f" {list(shape)}; use files of one model"
      )
  if tied_head and not np.array_equal(
    *(read_tensor(tensors[name]) for name in (_HEAD, _EMBEDDING))
  ):
    raise InputError(
      f"{tensors[_HEAD].path}: tensor {_HEAD!r} differs from the embedding it"
      f" is tied to; set 'tie_word_embeddings' to false in {CONFIG}"
    )


def write_json(file: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes a file with one JSON object and sorted keys."""
  text = json.dumps(values, indent=2, sort_keys=True) + "\n"
  file.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def published(
  path: str | os.PathLike[str], written: re.Pattern, *, first: Collection[str]
) -> Iterator[pathlib.Path]:
  """Yields a staging folder whose files are then moved into place.

  The file that a reader opens first is removed first and written last. If the
  process is killed in between, loading fails because this file is missing, and
  old and new files are never mixed.

  Args:
    path: directory of the files, created if necessary.
    written: pattern of the files of earlier calls, which are removed.
    first: possible names of the file that a reader opens first.

  Raises:
    InputError: The directory cannot be written.
  """
  directory = pathlib.Path(path)
  todo, kinds = "choose another", (OSError, safetensors.SafetensorError)
  with as_input_error(f"{directory}: cannot be written", todo, *kinds):
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=directory) as temp:
      stage = pathlib.Path(temp)
      yield stage
      text = next(stage.glob("*.json"))
      for file in stage.iterdir():
        # Safetensors may make a file readable by its owner only.
        shutil.copymode(text, file)
        files.to_disk(file)
      old = [x for x in directory.iterdir() if written.fullmatch(x.name)]
      for file in sorted(old, key=lambda file: file.name not in first):
        file.unlink()
      for file in sorted(stage.iterdir(), key=lambda file: file.name in first):
        os.replace(file, directory / file.name)
      files.to_disk(directory)
