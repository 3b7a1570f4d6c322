"""The files of a Hugging Face model directory, trusting none of them."""

import collections
import os
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import safetensors_io

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Buffers that old exports carry and every reader recomputes.
_HARMLESS = re.compile(r".*\brotary_emb\.inv_freq")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def directory(path: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the path of a directory that exists."""
  directory = pathlib.Path(path)
  if not directory.is_dir():
    raise InputError(
      f"{directory}: no such directory; give the directory of a downloaded"
      " model (`hf download MODEL --local-dir DIR` makes one)"
    )
  return directory


def member(directory: pathlib.Path, name: str) -> pathlib.Path:
  """Returns a regular file of the directory, by a plain name.

  A link may not lead out of the directory. The one exception is the download
  cache, where `snapshots/REVISION/NAME` is a link to `blobs/DIGEST`.
  """
  if (
    name in ("", ".", "..")
    or len(name) > 255
    or any(character in name for character in "/\\")
    or not name.isprintable()
  ):
    raise InputError(
      f"{directory}: {name[:80]!r} is not a plain file name; get the model"
      " again"
    )
  file = directory / name
  if not file.is_file():
    raise InputError(f"{file}: no such file; download the model again")
  home, target = directory.resolve(), file.resolve()
  allowed = [home]
  if home.parent.name == "snapshots":
    allowed.append(home.parent.parent / "blobs")
  if target.parent not in allowed:
    raise InputError(
      f"{file}: is a link that leaves its directory; put the file itself there"
    )
  return file


def read_json(file: pathlib.Path) -> dict[str, Any]:
  """Reads a file that must hold one JSON object."""
  try:
    if file.stat().st_size > safetensors_io.MAX_JSON_BYTES:
      raise InputError(f"{file}: too large to be real; get the file again")
    return safetensors_io.parse_json(file.read_bytes(), file)
  except OSError as error:
    raise InputError(f"{file}: cannot be read ({error.strerror})") from None


def read_headers(
  directory: pathlib.Path,
) -> tuple[pathlib.Path, dict[str, safetensors_io.Tensor]]:
  """Returns the file that lists the tensors, and all tensors by name."""
  if (directory / INDEX).exists():
    index = member(directory, INDEX)
    shards = _read_index(index)
    if (directory / SINGLE).exists() and SINGLE not in shards:
      raise InputError(
        f"{directory}: holds both {SINGLE} and {INDEX}; remove the one that"
        " does not belong to this model"
      )
    tensors = {}
    for shard, names in shards.items():
      tensors.update(_read_shard(index, member(directory, shard), names))
    return index, tensors
  if (directory / SINGLE).exists():
    single = member(directory, SINGLE)
    return single, safetensors_io.read_header(single)
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


def _read_index(index: pathlib.Path) -> dict[str, set[str]]:
  """Returns shard name -> tensor names."""
  weight_map = read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not all(
    isinstance(shard, str) for shard in weight_map.values()
  ):
    raise InputError(
      f"{index}: key 'weight_map' must map tensor names to file names; get the"
      " file again"
    )
  shards = collections.defaultdict(set)
  for name, shard in weight_map.items():
    shards[shard].add(name)
  return dict(shards)


def _read_shard(
  index: pathlib.Path, file: pathlib.Path, names: set[str]
) -> dict[str, safetensors_io.Tensor]:
  """Reads a shard's header, which must hold what the index says, no more."""
  header = safetensors_io.read_header(file)
  for problem, different in (
    ("lists in it, but is not there", names - set(header)),
    ("does not list in it", set(header) - names),
  ):
    different = [name for name in different if not _HARMLESS.fullmatch(name)]
    if different:
      raise InputError(
        f"{file}: holds other tensors than {index.name} says, as"
        f" {_some(different)}, which the index {problem}; get both files again"
      )
  return header


def _some(names: Collection[str]) -> str:
  """Returns the first of some names, and how many others there are."""
  first, *others = sorted(names)
  return f"{first[:80]!r}" + (f" and {len(others)} more" if others else "")


def check_tensors(
  listing: pathlib.Path,
  tensors: Mapping[str, safetensors_io.Tensor],
  shapes: Mapping[str, tuple[int, ...]],
) -> None:
  """Names and shapes must be those of the configuration, exactly.

  Args:
    listing: the file that lists the tensors, for messages.
    tensors: what the files hold.
    shapes: what the configuration asks for, by tensor name.

  Raises:
    InputError: a tensor is missing, has another shape, or has no place.
  """
  missing = shapes.keys() - tensors.keys()
  if missing:
    raise InputError(
      f"{listing}: tensor {_some(missing)} is missing that the configuration"
      " asks for; get the model's files again"
    )
  for name, shape in shapes.items():
    if tensors[name].shape != shape:
      raise InputError(
        f"{tensors[name].path}: tensor {name!r} has shape"
        f" {list(tensors[name].shape)} where the configuration asks for"
        f" {list(shape)}; use files of one model"
      )
  unexpected = [
    name
    for name in tensors.keys() - shapes.keys()
    if not _HARMLESS.fullmatch(name)
  ]
  if unexpected == ["lm_head.weight"]:
    _check_tied_head(tensors)
  elif unexpected:
    raise InputError(
      f"{listing}: tensor {_some(unexpected)} has no place in a model of this"
      " configuration; use files of one model"
    )


def _check_tied_head(tensors: Mapping[str, safetensors_io.Tensor]) -> None:
  """Some exports write a tied head as well; it must be the embedding."""
  names = ("lm_head.weight", "model.embed_tokens.weight")
  head, embedding = (tensors[name] for name in names)
  if head.shape == embedding.shape:
    arrays = [safetensors_io.read_tensor(name, tensors[name]) for name in names]
    if np.array_equal(*arrays):
      return
  raise InputError(
    f"{head.path}: tensor 'lm_head.weight' differs from the embedding it is"
    f" tied to; set 'tie_word_embeddings' to false in {CONFIG}"
  )
