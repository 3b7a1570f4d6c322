"""The COMMIT file, which marks a checkpoint as complete.

It is written last, when everything else is on disk, and lists every array with
its shape and a checksum computed on its devices. A folder without it is not a
checkpoint. It ends with a checksum of itself.
"""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import jaxrl_llm
from jaxrl_llm import digest
from jaxrl_llm.errors import InputError
from jaxrl_llm.system import files

FILE = "COMMIT"
FORMAT = 7  # Format version; no other one is read.


class DamagedError(InputError):
  """Raised if a checkpoint differs from what was saved."""

  def __init__(
    self,
    folder: pathlib.Path,
    what: str,
    todo: str = "use another step or another --workdir",
  ):
    self.folder, self.what, self.todo = folder, what, todo
    super().__init__(f"{folder}: this checkpoint is damaged ({what}); {todo}")

  def __reduce__(self):  # Processes send it to each other.
    return type(self), (self.folder, self.what, self.todo)


def steps(directory: pathlib.Path) -> list[int]:
  """Returns the steps of the complete checkpoints, ascending."""
  names = (file.parent.name for file in directory.glob(f"*/{FILE}"))
  return sorted(int(name) for name in names if is_step(name))


def is_step(name: str) -> bool:
  """Returns whether a folder name is a step number of `Checkpointer`."""
  return re.fullmatch("0|[1-9][0-9]{0,8}", name) is not None


def num_bytes(trees: Mapping[str, Any]) -> int:
  """Returns the total size of the arrays of all trees."""
  return sum(leaf.nbytes for leaf in jax.tree.leaves(trees))


def describe(trees: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the shape and dtype of every leaf, by path."""
  return {
    name: {"shape": list(np.shape(leaf)), "dtype": str(leaf.dtype)}
    for name, leaf in zip(*digest.named_leaves(trees))
  }


def write(
  folder: pathlib.Path,
  leaves: Mapping[str, Any],
  checksums: digest.Checksums,
  **record: Any,
) -> None:
  """Flushes a folder to disk and marks it as a complete checkpoint.

  Args:
    folder: the folder, complete except for the record.
    leaves: result of `describe`.
    checksums: checksums of the same leaves.
    **record: further entries of the record.
  """
  files.tree_to_disk(folder)
  leaves = {
    name: {**leaf, "checksum": f"{checksums[name]:016x}"}
    for name, leaf in leaves.items()
  }
  record = {"format": FORMAT, "library": jaxrl_llm.__version__, **record}
  text = json.dumps({**record, "leaves": leaves}, indent=1) + "\n"
  files.write_whole(folder / FILE, f"{text}{digest.of_bytes(text.encode())}\n")
  files.to_disk(folder.parent)


def read(folder: pathlib.Path, *parts: str) -> dict[str, Any]:
  """Reads the record of a checkpoint.

  Args:
    folder: folder of the checkpoint.
    *parts: entries that the record must have, in addition to its leaves.

  Raises:
    DamagedError: The record differs from what was written.
    InputError: It does not exist, or another version wrote its format.
  """
  try:
    text = (folder / FILE).read_text(encoding="utf-8")
  except FileNotFoundError:
    what, todo = "no such checkpoint", "check the path"
    if folder.is_dir():
      what = "an incomplete save, or written by another version of jaxrl_llm"
      todo = "use another step, or the version that wrote it"
    raise InputError(f"{folder}: {what}; {todo}") from None
  except (OSError, UnicodeDecodeError) as error:
    raise DamagedError(folder, f"{FILE}: {type(error).__name__}") from error
  body, _, last = text.removesuffix("\n").rpartition("\n")
  if last != digest.of_bytes(f"{body}\n".encode()):
    raise DamagedError(folder, f"{FILE} has changed since it was written")
  record = json.loads(body)
  found = record.get("format") if isinstance(record, dict) else None
  if found != FORMAT:
    raise InputError(
      f"{folder}: checkpoint format {found!r}, but this version of"
      f" jaxrl_llm reads {FORMAT}; use the version that wrote it, or another"
      " --workdir"
    )
  for part in ("leaves", *parts):
    if not isinstance(record.get(part), dict):
      raise DamagedError(folder, f"{FILE} has no {part!r}")
  return record


def check_shapes(
  folder: pathlib.Path, record: Mapping[str, Any], targets: Mapping[str, Any]
) -> None:
  """Raises InputError if leaves are missing, left over or of other shapes."""
  saved, (names, leaves) = record["leaves"], digest.named_leaves(targets)
  more = {x for x in saved if x.split("/")[0] in targets}.difference(names)
  if more:
    raise InputError(
      f"{folder}: {min(more)} is not part of this model; use the model it was"
      " saved from or another --workdir"
    )
  for name, leaf in zip(names, leaves):
    shape = tuple(saved[name]["shape"]) if name in saved else None
    if shape != leaf.shape:
      raise InputError(
        f"{folder}: {name} has shape {shape}, but this model needs"
        f" {leaf.shape}; use the model it was saved from (model.path, for a"
        " critic also value.init_from) or another --workdir"
      )


def check_bits(
  folder: pathlib.Path, record: Mapping[str, Any], trees: Mapping[str, Any]
) -> None:
  """Raises DamagedError if restored arrays differ from the saved ones."""
  saved, found = record["leaves"], digest.checksums(trees)
  wrong = [n for n, x in found.items() if saved[n]["checksum"] != f"{x:016x}"]
  if wrong:
    differ = f"{len(wrong)} of {len(found)} arrays differ from what was saved"
    raise DamagedError(folder, f"{differ}, such as {wrong[0]}")
