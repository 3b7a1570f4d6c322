"""Reads the metrics files of the hosts of a fleet into arrays."""

import dataclasses
import math
import os
import pathlib
import statistics
from typing import Any

import numpy as np

from jaxrl_llm.data.rows import parse_rows
from jaxrl_llm.errors import InputError

_WINDOW_S = 900
_NOT_METRICS = ("time", "step", "role", "nonfinite")
# Phases that do not characterize a host: totals, start and waiting.
_NOT_WORK = {f"time/{x}_s" for x in ("step", "start", "wait", "compile")}
# The first process does more work for checkpoints than the others.
_NOT_WORK |= {f"host/{x}" for x in ("wait_s", "checkpoint_s", "suspect")}


@dataclasses.dataclass(frozen=True)
class Reports:
  """Rows logged by hosts: either training steps or samples of metrics."""

  hosts: dict[str, list[dict[str, Any]]]  # By name, sorted by time.

  @property
  def roles(self) -> list[str]:
    """Returns the roles of the hosts."""
    return [str(rows[-1].get("role", "")) for rows in self.hosts.values()]

  @property
  def of_steps(self) -> bool:
    """Returns whether the rows are training steps."""
    return "step" in next(iter(self.hosts.values()))[0]

  @property
  def now(self) -> float:
    """Returns the time by the median host's clock, or the later one of two."""
    times = [rows[-1]["time"] for rows in self.hosts.values()]
    return max(times) if len(times) < 3 else statistics.median_low(times)

  def samples(self) -> tuple[np.ndarray, list[str]]:
    """Returns the last 15 minutes [H, S, K], NaN where missing, and names [K].

    Raises:
      InputError: there are no metrics.
    """
    first = min(rows[0]["time"] for rows in self.hosts.values())
    end, names = self.now, self._metrics()
    begin = max(first, end - _WINDOW_S + 1)
    if not names:
      raise InputError("no metrics besides 'time'; log some")
    seconds = int(end - begin) + 1
    x = np.full((len(self.hosts), seconds, len(names)), np.nan)
    for host, rows in enumerate(self.hosts.values()):
      for row in rows:
        if begin <= row["time"] <= end:
          second = int(row["time"] - begin)
          x[host, second] = [_number(row.get(name)) for name in names]
    return x, names

  def phases(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Returns the phases of the steps that all hosts have logged.

    Returns:
      Seconds of the phases [H, N, P], of the steps [H, N], and names [P].
    """
    by_step = [{r["step"]: r for r in rows} for rows in self.hosts.values()]
    steps = sorted(set.intersection(*map(set, by_step)))
    every = [name for name in self._metrics() if name not in _NOT_WORK]
    names = [name for name in every if name.startswith("host/")]
    names = names or [name for name in every if name.startswith("time/")]
    read = lambda *names: np.reshape(
      [[[_number(r[s].get(n)) for n in names] for s in steps] for r in by_step],
      (len(by_step), len(steps), len(names)),
    )
    return read(*names), read("time/step_s")[..., 0], names

  def _metrics(self) -> list[str]:
    every = {k for rows in self.hosts.values() for row in rows for k in row}
    return sorted(every - set(_NOT_METRICS))


def read_reports(folder: pathlib.Path, *, tail: float = math.inf) -> Reports:
  """Reads the file HOST.jsonl of every host.

  Args:
    folder: folder of the files.
    tail: reads only the complete lines in this many bytes at the end of each
      file, and skips hosts without any.

  Raises:
    InputError: there are no files, or a line cannot be used.
  """
  hosts = {}
  for file in sorted(folder.glob("*.jsonl")):
    with file.open("rb") as opened:
      size = opened.seek(0, os.SEEK_END)
      opened.seek(max(size - tail, 0))
      data = opened.read()
    begin = data.find(b"\n") + 1 if size > tail else 0
    # A host may be writing its last line.
    data = data[begin : data.rfind(b"\n") + 1]
    if not data and tail < math.inf:
      continue
    rows = parse_rows(data, str(file))
    for where, fields in rows:
      problem = ""
      if not math.isfinite(_number(fields.get("time"))):
        problem = "no number 'time'; give Unix seconds"
      elif type(fields.get("step", 0)) is not int:
        problem = "'step' is not an integer; correct it"
      elif "step" in fields and not math.isfinite(
        _number(fields.get("time/step_s"))
      ):
        problem = "no number 'time/step_s'; give seconds"
      if problem:
        raise InputError(f"{where}: {problem}")
    every = [row.fields for row in rows]
    hosts[file.stem] = sorted(every, key=lambda row: row["time"])
  if not hosts:
    raise InputError(f"{folder}: no file HOST.jsonl")
  kinds = {"step" in row for rows in hosts.values() for row in rows}
  if len(kinds) > 1:
    raise InputError(
      f"{folder}: some rows are steps and some are samples; use a folder for"
      " each kind"
    )
  return Reports(hosts)


def _number(value: Any) -> float:
  try:
    return float(value) if isinstance(value, int | float) else math.nan
  except OverflowError:
    return math.nan
