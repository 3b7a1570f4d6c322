"""Writes files that survive a power failure."""

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def named(path: str | os.PathLike) -> Iterator[None]:
  """Adds a path to errors of the system that name none, such as a full disk."""
  try:
    yield
  except OSError as error:
    if error.errno and error.filename is None:
      error.filename = str(path)
    raise


def to_disk(path: str | os.PathLike) -> None:
  """Flushes a file, or the entries of a folder, to disk."""
  file = os.open(path, os.O_RDONLY)
  try:
    with named(path):
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
  with named(file):
    part.write_text(text, encoding="utf-8")
  to_disk(part)
  os.replace(part, file)
  to_disk(file.parent)
