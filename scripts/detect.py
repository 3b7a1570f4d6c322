"""Finds the faulty hosts of a fleet from the metrics that all hosts report.

    python scripts/detect.py --metrics=DIR [--hold_s=240] [--threshold=1.6]

DIR has one JSONL file per host, HOST.jsonl. A line is either a sample,

    {"time": UNIX_SECONDS, "role": "trainer", "cpu_usage": 71.5, ...}

about one per second, with any metrics and the host's `role` (hosts with
different roles do different work; by default all have the same role); the last
15 minutes are used. Or it is a row of a training step, as every process of a
multi-process run writes to WORKDIR/hosts,

    {"step": 12, "time": UNIX_SECONDS, "time/step_s": 9.5, "host/reward_s": 3.1}

whose phases are compared, excluding waiting time (host/*) where it is known. A
host is reported if it deviates from the other hosts of its role and from its
own baseline for --hold_s seconds without a break, if it takes 1.5 times as long
as they do for 20 seconds and four steps, or if it has been silent for a minute
by the median host's clock. The baseline of a host is its level in the first
three of the 15 minutes, so run the command every five minutes: a host that
failed before that window looks normal.

Roles with fewer than three hosts are not compared, because any of them could be
the faulty one. If no role has three and there are two hosts in all, the error
names the one that is more likely faulty.

Exit code 0 if no host is faulty, 1 if one is, 2 for bad input and for hosts
that cannot be compared.
"""

import collections
import pathlib
import sys

import numpy as np
from parts import program

from jaxrl_llm import fleet
from jaxrl_llm.errors import InputError

_SILENT_S = 60


def report(
  reports: fleet.Reports, *, threshold: float, hold_s: float
) -> list[str]:
  """Returns a line for each faulty host."""
  hosts, roles, end = reports.hosts, reports.roles, reports.now
  names = list(hosts)
  lines = []
  for name, rows in hosts.items():
    silence = end - rows[-1]["time"]
    if silence >= _SILENT_S:
      doubt = ", or the other clock is ahead" if len(hosts) == 2 else ""
      lines.append(f"{name}: silent for {silence:.0f} s{doubt}")
    if silence <= -_SILENT_S:
      lines.append(f"{name}: its clock is {-silence:.0f} s ahead")
  if reports.of_steps:
    x, took, metrics = reports.phases()
    for alarm in fleet.slow_hosts(x, took, roles=roles):
      lines.append(
        f"{names[alarm.host]}: {metrics[alarm.metric]} takes"
        f" {alarm.score:.1f} times as long as elsewhere, for"
        f" {alarm.until - alarm.since:.0f} s"
      )
    return lines
  x, metrics = reports.samples()
  how = {"threshold": threshold, "hold_s": hold_s}
  for alarm in fleet.detect(x, metrics, roles, **how):
    since = end - x.shape[1] + alarm.since
    lines.append(
      f"{names[alarm.host]}: {alarm.metric} deviates from the other hosts of"
      f" its role since {since:.0f} ({alarm.until - alarm.since:.0f} s, score"
      f" {alarm.score:.1f})"
    )
  return lines


def suspicion(reports: fleet.Reports) -> str:
  """Returns which of two hosts is more likely faulty; '' if neither stands out.

  It is the host that takes longer for a phase, or whose metric has moved
  farther from its level in the first minutes.
  """
  names = list(reports.hosts)
  if len(names) != 2 or len(set(reports.roles)) != 1:
    return ""
  if reports.of_steps:
    x, took, metrics = reports.phases()
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
  x, metrics = reports.samples()
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


@program.one_line
def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = program.make_parser(__doc__)
  parser.add_argument("--metrics", required=True, metavar="DIR")
  parser.add_argument("--hold_s", type=float, default=240.0)
  parser.add_argument("--threshold", type=float, default=fleet.THRESHOLD)
  options = parser.parse_args(arguments)
  reports = fleet.read_reports(pathlib.Path(options.metrics))
  lines = report(reports, threshold=options.threshold, hold_s=options.hold_s)
  hosts, sizes = reports.hosts, collections.Counter(reports.roles)
  if not lines and max(sizes.values()) < fleet.FEWEST:
    raise InputError(
      f"{options.metrics}: cannot compare {len(hosts)} host(s); give at least"
      f" {fleet.FEWEST} per role{suspicion(reports)}"
    )
  print("\n".join(lines) or f"none of the {len(hosts)} hosts is faulty")
  for role, size in sizes.items():
    if size < fleet.FEWEST:
      print(f"not compared: {size} of role '{role}' (at least {fleet.FEWEST})")
  return 1 if lines else 0


if __name__ == "__main__":
  sys.exit(main())
