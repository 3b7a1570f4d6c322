"""Says which host of a fleet is broken, from what every host reports.

    python scripts/detect.py --metrics=DIR [--hold_s=240] [--threshold=1.7]

DIR has one JSONL file a host, HOST.jsonl. A line is either a sample,

    {"time": UNIX_SECONDS, "role": "trainer", "cpu_usage": 71.5, ...}

about one a second, `role` (hosts of other roles do other work; the same for
all if left out) and any metrics; the last 15 minutes are looked at. Or it is a
row of a training step, as every process of a run of several writes them to
DIR/hosts of its --workdir,

    {"step": 12, "time": UNIX_SECONDS, "time/step_s": 9.5, "host/reward_s": 3.1}

whose phases are compared, without what they wait for (host/*) if that is known.
A host is named if it is unlike the others of its
role for --hold_s seconds without a break, if it takes 1.5 times as long as they
do for 20 seconds and three steps, or if it has been silent for a minute by the
median host's clock. Fewer than three hosts of a role are not compared.

Exit code 0 if nobody is broken, 1 if somebody is, 2 for bad input.
"""

import argparse
import math
import pathlib
import statistics
import sys
from typing import Any

import numpy as np

from jaxrl_llm import fleet
from jaxrl_llm.data.rows import parse_rows
from jaxrl_llm.errors import InputError

_WINDOW_S = 900
_SILENT_S = 60
_NOT_METRICS = ("time", "step", "role", "nonfinite")
# What says nothing of a host: the whole, its start, and what it waits for.
_NOT_WORK = {f"time/{x}_s" for x in ("step", "start", "wait", "compile")}
_NOT_WORK.add("host/wait_s")


def read_fleet(folder: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
  """The rows of every host by its name, in the order of time.

  Raises:
    InputError: there are no files, or a line cannot be used.
  """
  hosts = {}
  for file in sorted(folder.glob("*.jsonl")):
    data = file.read_bytes()
    # A host may be writing its last line.
    rows = parse_rows(data[: data.rfind(b"\n") + 1], str(file), "jsonl")
    for row in rows:
      if not math.isfinite(_number(row.fields.get("time"))):
        raise InputError(f"{row.where}: no number 'time'; give Unix seconds")
      if "step" not in row.fields:
        continue
      if type(row.fields["step"]) is not int:
        raise InputError(f"{row.where}: 'step' is no integer; correct it")
      if not math.isfinite(_number(row.fields.get("time/step_s"))):
        raise InputError(f"{row.where}: no number 'time/step_s'; give seconds")
    fields = [row.fields for row in rows]
    hosts[file.stem] = sorted(fields, key=lambda row: row["time"])
  if not hosts:
    raise InputError(f"{folder}: no file HOST.jsonl of a host")
  kinds = {"step" in row for rows in hosts.values() for row in rows}
  if len(kinds) > 1:
    raise InputError(
      f"{folder}: some rows are of steps and some are samples; give a folder to"
      " each kind"
    )
  return hosts


def newest(hosts: dict[str, list[dict[str, Any]]]) -> float:
  """Now, by the median host: one with a wrong clock does not count."""
  return statistics.median_low(rows[-1]["time"] for rows in hosts.values())


def samples(
  hosts: dict[str, list[dict[str, Any]]],
) -> tuple[np.ndarray, list[str]]:
  """The last 15 minutes [H, S, K], NaN where nothing arrived, and names [K]."""
  end = newest(hosts)
  first = min(rows[0]["time"] for rows in hosts.values())
  begin = max(first, end - _WINDOW_S + 1)
  names = _numbers(hosts)
  x = np.full((len(hosts), int(end - begin) + 1, len(names)), np.nan)
  for host, rows in enumerate(hosts.values()):
    for row in rows:
      if begin <= row["time"] <= end:
        second = int(row["time"] - begin)
        x[host, second] = [_number(row.get(name)) for name in names]
  return x, names


def phases(
  hosts: dict[str, list[dict[str, Any]]],
) -> tuple[np.ndarray, np.ndarray, list[str]]:
  """Of the steps that all have.

  Returns:
    Seconds of the phases [H, N, P], of the steps [H, N], and names [P].
  """
  by_step = [{row["step"]: row for row in rows} for rows in hosts.values()]
  steps = sorted(set.intersection(*map(set, by_step)))
  every = [name for name in _numbers(hosts) if name not in _NOT_WORK]
  names = [name for name in every if name.startswith("host/")]
  names = names or [name for name in every if name.startswith("time/")]
  read = lambda *names: np.reshape(
    [[[_number(r[s].get(n)) for n in names] for s in steps] for r in by_step],
    (len(hosts), len(steps), len(names)),
  )
  return read(*names), read("time/step_s")[..., 0], names


def _numbers(hosts) -> list[str]:
  every = {key for rows in hosts.values() for row in rows for key in row}
  return sorted(every - set(_NOT_METRICS))


def _number(value: Any) -> float:
  try:
    return float(value) if isinstance(value, int | float) else math.nan
  except OverflowError:
    return math.nan


def report(hosts, *, threshold: float, hold_s: float) -> list[str]:
  """A line for each broken host."""
  names = list(hosts)
  end = newest(hosts)
  roles = [str(rows[-1].get("role", "")) for rows in hosts.values()]
  lines = []
  for name, rows in hosts.items():
    silence = end - rows[-1]["time"]
    if silence >= _SILENT_S and len(hosts) >= 3:
      lines.append(f"{name}: silent for {silence:.0f} s")
    if silence <= -_SILENT_S and len(hosts) >= 3:
      lines.append(f"{name}: its clock is {-silence:.0f} s ahead")
  if "step" in next(iter(hosts.values()))[0]:
    x, took, metrics = phases(hosts)
    for alarm in fleet.slow_hosts(x, took, roles=roles) if x.size else ():
      lines.append(
        f"{names[alarm.host]}: {metrics[alarm.metric]} takes"
        f" {alarm.score:.1f} times as long as elsewhere, for"
        f" {alarm.until - alarm.since:.0f} s"
      )
    return lines
  x, metrics = samples(hosts)
  for alarm in fleet.detect(x, roles=roles, threshold=threshold, hold_s=hold_s):
    since = end - x.shape[1] + alarm.since
    lines.append(
      f"{names[alarm.host]}: {metrics[alarm.metric]} unlike the other hosts of"
      f" its role since {since:.0f} ({alarm.until - alarm.since:.0f} s, score"
      f" {alarm.score:.1f})"
    )
  return lines


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--metrics", required=True, metavar="DIR")
  parser.add_argument("--hold_s", type=float, default=240.0)
  parser.add_argument("--threshold", type=float, default=fleet.THRESHOLD)
  options = parser.parse_args(arguments)
  try:
    hosts = read_fleet(pathlib.Path(options.metrics))
    lines = report(hosts, threshold=options.threshold, hold_s=options.hold_s)
  except (InputError, OSError) as error:
    print(f"detect: {error}", file=sys.stderr)
    return 2
  print("\n".join(lines) or f"nobody of {len(hosts)} hosts is broken")
  return 1 if lines else 0


if __name__ == "__main__":
  sys.exit(main())
