"""Files that outlive a power cut."""

import os
import pathlib


def to_disk(path: str | os.PathLike) -> None:
  """Returns when a file, or the names in a folder, outlive a power cut."""
  file = os.open(path, os.O_RDONLY)
  try:
    os.fsync(file)
  finally:
    os.close(file)


def tree_to_disk(folder: pathlib.Path) -> None:
  """As `to_disk`, of a folder and all below it."""
  for path in (*folder.rglob("*"), folder):
    to_disk(path)


def write_whole(file: pathlib.Path, text: str) -> None:
  """All of a text or, should this be interrupted, what was there before."""
  part = file.with_name(file.name + ".part")
  part.write_text(text, encoding="utf-8")
  to_disk(part)
  os.replace(part, file)
  to_disk(file.parent)
