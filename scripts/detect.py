"""Says which host of a fleet is broken, from what every host reports.

    python scripts/detect.py --metrics=DIR [--hold_s=240] [--threshold=1.6]

DIR has one JSONL file a host, HOST.jsonl. A line is either a sample,

    {"time": UNIX_SECONDS, "role": "trainer", "cpu_usage": 71.5, ...}

about one a second, `role` (hosts of other roles do other work; the same for
all if left out) and any metrics; the last 15 minutes are looked at. Or it is a
row of a training step, as every process of a run of several writes them to
DIR/hosts of its --workdir,

    {"step": 12, "time": UNIX_SECONDS, "time/step_s": 9.5, "host/reward_s": 3.1}

whose phases are compared, without what they wait for (host/*) if that is known.
A host is named if it departs from the others of its role and from its own norm
for --hold_s seconds without a break, if it takes 1.5 times as long as they do
for 20 seconds and three steps, or if it has been silent for a minute by the
median host's clock. The norm of a host is its level in the first three of the
15 minutes, so call the command every five minutes: a host that broke before
them looks normal.

Fewer than three hosts of a role are not compared, as any of them could be the
broken one. If no role has three, the error names the host that is more likely
broken of two.

Exit code 0 if no host is broken, 1 if one is, 2 for bad input and for hosts
that cannot be compared.
"""

import collections
import math
import pathlib
import statistics
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from parts import program

from jaxrl_llm import fleet
from jaxrl_llm.data.rows import parse_rows
from jaxrl_llm.errors import InputError

_WINDOW_S = 900
_SILENT_S = 60
_NOT_METRICS = ("time", "step", "role", "nonfinite")
# Phases that do not characterize a host: totals, start and waiting.
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
      number = lambda key, fields=row.fields: _number(fields.get(key))
      problem = ""
      if not math.isfinite(number("time")):
        problem = "no number 'time'; give Unix seconds"
      elif type(row.fields.get("step", 0)) is not int:
        problem = "'step' is no integer; correct it"
      elif "step" in row.fields and not math.isfinite(number("time/step_s")):
        problem = "no number 'time/step_s'; give seconds"
      if problem:
        raise InputError(f"{row.where}: {problem}")
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
  """Returns the present by the median host's clock; the later one of two."""
  times = [rows[-1]["time"] for rows in hosts.values()]
  return max(times) if len(times) < 3 else statistics.median_low(times)


def samples(
  hosts: dict[str, list[dict[str, Any]]],
) -> tuple[np.ndarray, list[str]]:
  """The last 15 minutes [H, S, K], NaN where nothing arrived, and names [K]."""
  end = newest(hosts)
  first = min(rows[0]["time"] for rows in hosts.values())
  begin = max(first, end - _WINDOW_S + 1)
  names = _numbers(hosts)
  if not names:
    raise InputError("no metrics beside 'time'; write some")
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
  """Returns the phases of the steps that all hosts have.

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
  """Returns a line for each broken host."""
  names = list(hosts)
  end = newest(hosts)
  roles = list(_roles(hosts))
  lines = []
  for name, rows in hosts.items():
    silence = end - rows[-1]["time"]
    if silence >= _SILENT_S:
      doubt = ", or the other clock is ahead" if len(hosts) == 2 else ""
      lines.append(f"{name}: silent for {silence:.0f} s{doubt}")
    if silence <= -_SILENT_S:
      lines.append(f"{name}: its clock is {-silence:.0f} s ahead")
  if _has_steps(hosts):
    x, took, metrics = phases(hosts)
    for alarm in fleet.slow_hosts(x, took, roles=roles) if x.size else ():
      lines.append(
        f"{names[alarm.host]}: {metrics[alarm.metric]} takes"
        f" {alarm.score:.1f} times as long as elsewhere, for"
        f" {alarm.until - alarm.since:.0f} s"
      )
    return lines
  x, metrics = samples(hosts)
  how = {"threshold": threshold, "hold_s": hold_s}
  for alarm in fleet.detect(x, metrics, roles, **how):
    since = end - x.shape[1] + alarm.since
    lines.append(
      f"{names[alarm.host]}: {alarm.metric} unlike the other hosts of its role"
      f" since {since:.0f} ({alarm.until - alarm.since:.0f} s, score"
      f" {alarm.score:.1f})"
    )
  return lines


def suspicion(hosts: dict[str, list[dict[str, Any]]]) -> str:
  """Returns which of two hosts is more likely broken; '' if neither stands out.

  It is the one that takes longer for a phase, or whose metric has moved farther
  from its own first minutes.
  """
  names = list(hosts)
  if len(names) != 2 or len(set(_roles(hosts))) != 1:
    return ""
  if _has_steps(hosts):
    x, took, metrics = phases(hosts)
    if not x.size:
      return ""
    recent = np.median(np.nan_to_num(x[:, -3:]), axis=1)  # [2, P]
    usual = np.maximum(recent.min(axis=0), 0.05 * np.median(took[:, -3:]))
    ratio = recent.max(axis=0) / usual
    phase = int(ratio.argmax())
    if not ratio[phase] >= 1.5:
      return ""
    host = int(recent[:, phase].argmax())
    return (
      f"; more likely {names[host]}: {metrics[phase]} takes"
      f" {ratio[phase]:.1f} times as long as on {names[1 - host]}"
    )
  x, metrics = samples(hosts)
  x = fleet.fill_gaps(x)
  apart = x[0] - x[1]
  first = apart[:180]
  norm = np.median(first, axis=0)
  noise = 1.5 * np.median(np.abs(first - norm), axis=0)
  moved = np.abs(apart[-60:].mean(axis=0) - norm) / np.maximum(noise, 1e-9)
  metric = int(moved.argmax())
  before = np.median(x[:, :180, metric], axis=1)
  after = x[:, -60:, metric].mean(axis=1)
  host = int(np.abs(after - before).argmax())
  if not moved[metric] >= fleet.THRESHOLD:
    return ""
  return (
    f"; more likely {names[host]}: {metrics[metric]} has moved from"
    f" {before[host]:.4g} to {after[host]:.4g}"
  )


def _roles(hosts) -> Iterable[str]:
  return (str(rows[-1].get("role", "")) for rows in hosts.values())


def _has_steps(hosts) -> bool:
  return "step" in next(iter(hosts.values()))[0]


@program.one_line
def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = program.make_parser(__doc__)
  parser.add_argument("--metrics", required=True, metavar="DIR")
  parser.add_argument("--hold_s", type=float, default=240.0)
  parser.add_argument("--threshold", type=float, default=fleet.THRESHOLD)
  options = parser.parse_args(arguments)
  hosts = read_fleet(pathlib.Path(options.metrics))
  lines = report(hosts, threshold=options.threshold, hold_s=options.hold_s)
  sizes = collections.Counter(_roles(hosts))
  if not lines and max(sizes.values()) < fleet.FEWEST:
    raise InputError(
      f"{options.metrics}: cannot compare {len(hosts)} host(s); give at least"
      f" {fleet.FEWEST} of a role{suspicion(hosts)}"
    )
  print("\n".join(lines) or f"none of the {len(hosts)} hosts is broken")
  for role, size in sizes.items():
    if size < fleet.FEWEST:
      print(f"not compared: {size} of role '{role}' (at least {fleet.FEWEST})")
  return 1 if lines else 0


if __name__ == "__main__":
  sys.exit(main())
