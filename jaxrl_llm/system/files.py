"""Writes files that survive a power failure."""

import os
import pathlib


def to_disk(path: str | os.PathLike) -> None:
  """Flushes a file, or the entries of a folder, to disk."""
  file = os.open(path, os.O_RDONLY)
  try:
    os.fsync(file)
  finally:
    os.close(file)


def tree_to_disk(folder: pathlib.Path) -> None:
  """Flushes a folder and everything below it to disk."""
  for path in (*folder.rglob("*"), folder):
    to_disk(path)


def write_whole(file: pathlib.Path, text: str) -> None:
  """Replaces a file atomically: an interruption leaves the old one."""
  part = file.with_name(file.name + ".part")
  part.write_text(text, encoding="utf-8")
  to_disk(part)
  os.replace(part, file)
  to_disk(file.parent)
