"""Writers of metric rows: append-only JSON lines that survive crashes."""

import contextlib
import errno
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.system import files

Row = dict[str, Any]


def read_rows(path: str | os.PathLike) -> list[Row]:
  """Reads JSON lines with a `step`; skips an incomplete last line.

  Raises:
    InputError: A line other than the last is not an object with a `step`.
    OSError: The file cannot be read.
  """
  return list(iterate_rows(path))


def iterate_rows(path: str | os.PathLike) -> Iterator[Row]:
  """Yields the rows of `read_rows` without holding all of them in memory."""
  return (row for _, row in _parse(path))


def mend(path: pathlib.Path) -> list[str]:
  """Drops damaged lines of a file, which is kept as NAME.damaged.

  Returns:
    A line about it; none if no line was damaged.
  """
  try:
    for _ in _parse(path):
      pass
    return []
  except InputError:
    lines = path.read_bytes().splitlines(keepends=True)
    kept = shutil.copy2(path, f"{path}.damaged")
    files.write_whole(path, b"".join(filter(_row, lines)).decode())
    return [f"{path.name} has damaged lines: see {kept}"]


def _row(line: bytes) -> Row | None:
  with contextlib.suppress(ValueError):
    row = json.loads(line) if line.endswith(b"\n") else None
    if isinstance(row, dict) and isinstance(row.get("step"), int):
      return row
  return None


def _parse(path: str | os.PathLike) -> Iterator[tuple[bytes, Row]]:
  damaged = None
  with open(path, "rb") as file:
    for number, line in enumerate(file, start=1):
      if damaged is not None:
        raise InputError(
          f"{path}, line {damaged}: not a JSON object with an integer 'step';"
          " repair or remove the line"
        )
      if row := _row(line):
        yield line, row
      else:
        damaged = number


class JsonlWriter:
  """Appends one JSON object per step: `step`, `time` (Unix seconds), metrics.

  Rows are never corrupted, duplicated or lost if the process dies: a row is one
  durable append, steps must increase, and a resumed run first drops rows after
  its checkpoint. Hence step s must be logged before its checkpoint is
  committed.

  JSON has no NaN: a non-finite metric is `null`, and `nonfinite` in the same
  row maps its name to 'nan', 'inf' or '-inf'.

  Attributes:
    last_step: the step of the last row, None for an empty file.
  """

  _FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT

  def __init__(
    self, path: str | os.PathLike, *, clock: Callable[[], float] = time.time
  ):
    """Opens or creates the file; drops an incomplete last line.

    Raises:
      InputError: A line is damaged.
      OSError: It cannot be written.
    """
    self._path, self._clock = pathlib.Path(path), clock
    self._path.parent.mkdir(parents=True, exist_ok=True)
    if self._path.exists() and not self._path.is_file():
      raise OSError(errno.EINVAL, "not a regular file", str(path))
    self._file = os.open(self._path, self._FLAGS, 0o666)
    self.truncate_after(math.inf)

  def truncate_after(self, step: float) -> None:
    """Drops all rows after a step, in one system call."""
    self.last_step, size = None, 0
    for line, row in _parse(self._path):
      if row["step"] > step:
        break
      self.last_step, size = row["step"], size + len(line)
    os.ftruncate(self._file, size)
    os.fsync(self._file)

  def append(self, rows: Sequence[Row]) -> None:
    """Writes all rows or none; each has a `step`.

    A file that was removed or replaced meanwhile is restored.
    """
    lines = (json.dumps(row, allow_nan=False) + "\n" for row in rows)
    left = "".join(lines).encode()
    with files.named(self._path):
      self._restore()
      size = os.fstat(self._file).st_size
      try:
        while left:  # A full disk takes a part, and the next call raises.
          left = left[os.write(self._file, left) :]
      except OSError:
        os.ftruncate(self._file, size)
        raise
      os.fsync(self._file)
    if rows:
      self.last_step = rows[-1]["step"]

  def _restore(self) -> None:
    own = os.fstat(self._file)
    with contextlib.suppress(FileNotFoundError):
      if os.path.samestat(own, self._path.stat()):
        return
    rows = os.pread(self._file, own.st_size, 0).decode()
    files.write_whole(self._path, rows)
    os.close(self._file)
    self._file = os.open(self._path, self._FLAGS)

  def log(self, step: int, metrics: Mapping[str, float], **labels: str) -> None:
    """Appends the row of a step; `labels` are further fields with text.

    Raises:
      ValueError: The step is not later than the last one, or a metric is not a
        single number.
    """
    if self.last_step is not None and step <= self.last_step:
      raise ValueError(
        f"{self._path}: step must be > {self.last_step}, got {step}"
      )
    row = {"step": int(step), "time": self._clock(), **labels}
    nonfinite = {}
    for name, value in metrics.items():
      row[name] = number(name, value)
      if not math.isfinite(row[name]):
        nonfinite[name] = str(row[name])
        row[name] = None
    if nonfinite:
      row["nonfinite"] = nonfinite
    self.append([row])

  def close(self) -> None:
    """Closes the file."""
    os.close(self._file)


class NullWriter:
  """Replaces `JsonlWriter` in processes that do not write the file."""

  def truncate_after(self, step: float) -> None:
    """Does nothing."""

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    """Does nothing."""

  def close(self) -> None:
    """Does nothing."""


def number(name: str, value: Any) -> int | float:
  """Converts a metric to a number.

  Raises:
    ValueError: The metric is not a single number.
  """
  array = np.asarray(value)
  if array.shape == () and array.dtype.kind in "biu":
    return int(array)
  # NumPy reports kind V for bfloat16.
  if array.shape == () and array.dtype.kind in "fV":
    return float(array)
  raise ValueError(f"metric {name} must be one number, got {value!r}")
