"""Finds suspect hosts of a run while it is running.

With several processes, each writes two files in `hosts` below the directory of
the run: one has a row per step (`metrics.PhaseLogger`), the other a sample of
the process every few seconds (`HostWatch`), which reveals a frozen process. Any
process can read them.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.fleet.alarm import Alarm, slow_hosts
from jaxrl_llm.fleet.reports import Reports, read_reports

_SAMPLES = "samples"  # Subfolder of `hosts`.
_HOLD = 4  # Consecutive samples that make a host suspect.
_TAIL = 2**15  # Bytes read from the end of a file of steps.
_TICK_S = 0.02
_QUIET_S = 60.0  # A host suspected again after this time is reported again.
_SILENT, _MEMORY = "silent", "memory_usage"
# Compared metric of the samples -> value below which it is ignored.
_SHARES = {"stalled": 0.25, _MEMORY: 0.05}


def suspects(folder: pathlib.Path, every_s: float) -> dict[str, Alarm]:
  """Returns the suspects of a run by host; times are in Unix seconds.

  A host is suspect if it has written nothing for four sampling intervals, if it
  stalls or uses more memory than the others in four consecutive samples, or if
  it takes longer than the others for a phase in at least four consecutive steps
  that last four sampling intervals. With two hosts, only a silent one is named.

  Args:
    folder: `hosts` in the directory of a run. Files that are missing or cannot
      be read count as empty.
    every_s: seconds between samples.
  """
  found, hold_s = [], _HOLD * every_s
  with contextlib.suppress(InputError, OSError):
    samples = read_reports(folder / _SAMPLES, tail=_TAIL // 8)
    for host, (name, rows) in enumerate(samples.hosts.items()):
      last, now = rows[-1]["time"], samples.now
      if now - last >= hold_s:
        found.append((name, Alarm(host, _SILENT, last, now, now - last)))
    number = min(map(len, samples.hosts.values()))
    recent = [rows[-number:] for rows in samples.hosts.values()]
    x = [[[row[k] for k in _SHARES] for row in rows] for rows in recent]
    # Scaled, as `slow_hosts` ignores values below a twentieth of a step.
    x = every_s / 20 * np.array(x) / [*_SHARES.values()]
    took = np.full(x.shape[:2], every_s)
    found += _slow(samples, (x, took, [*_SHARES]), hold_s)
  with contextlib.suppress(InputError, OSError):
    steps = read_reports(folder, tail=_TAIL)
    found += _slow(steps, steps.phases(), hold_s)
  return dict(reversed(found))


def _slow(
  reports: Reports,
  phases: tuple[np.ndarray, np.ndarray, list[str]],
  hold_s: float,
) -> list[tuple[str, Alarm]]:
  """Returns `slow_hosts` with names of hosts and metrics, in Unix seconds."""
  (x, took, metrics), found = phases, []
  for alarm in slow_hosts(x, took, roles=reports.roles, hold_s=hold_s):
    name, rows = list(reports.hosts.items())[alarm.host]
    end, metric = rows[-1]["time"], metrics[alarm.metric]
    since = end - (alarm.until - alarm.since)
    found.append((name, alarm._replace(metric=metric, since=since, until=end)))
  return found


def describe(found: dict[str, Alarm]) -> list[str]:
  """Returns a line for each result of `suspects`."""
  lines = []
  for name, alarm in found.items():
    since = datetime.datetime.fromtimestamp(alarm.since).astimezone()
    what = f"{alarm.metric} is {alarm.score:.1f} times that of the other hosts"
    what = _SILENT if alarm.metric == _SILENT else what
    lines.append(f"suspect host {name}: {what} since {since:%F %T %Z}")
  return lines


@dataclasses.dataclass
class HostWatch:
  """Samples a process in a thread; in the first process, reports suspects."""

  folder: pathlib.Path  # `hosts` in the directory of the run.
  name: str  # Number and host of this process, such as 3-worker.
  every_s: float  # Seconds between samples.
  # Called with a line for each new suspect; None does not look for any.
  tell: Callable[[str], None] | None = None
  # Whether a checkpoint is being written, for which some processes may hold
  # more memory than others.
  saving: Callable[[], bool] = bool
  role: str = ""  # Only processes of one role are compared.
  # Seconds by which the first process's clock is ahead. Without them, a host
  # whose clock is wrong would seem silent.
  ahead_s: float = 0.0

  def __post_init__(self):
    self._seen = {}  # Host -> when it was last suspected.
    self._suspects, self._of_step = {}, {}
    self._ended = threading.Event()

  @contextlib.contextmanager
  def running(self) -> Iterator[None]:
    """Samples while the context is open."""
    thread = threading.Thread(target=self._run, daemon=True)
    thread.start()
    try:
      yield
    finally:
      self._ended.set()
      thread.join(self.every_s)

  def metrics(self) -> dict[str, int]:
    """Returns `host/suspect`, the first suspect process since the last call."""
    found, self._of_step = self._of_step, dict(self._suspects)
    numbers = [int(name.split("-")[0]) for name in found]
    return {"host/suspect": min(numbers)} if numbers else {}

  def describe(self) -> list[str]:
    """Returns a line for each host that is suspected now, in any process."""
    return describe(suspects(self.folder, self.every_s))

  def _run(self) -> None:
    # The first sample is written at once.
    begun, stalled, used = -self.every_s, 0.0, time.process_time()
    while True:
      asleep = time.monotonic()
      if self._ended.wait(_TICK_S):
        return
      now = time.monotonic()
      stalled += max(now - asleep - 2 * _TICK_S, 0.0)
      if now - begun < self.every_s:
        continue
      seconds, cpu = now - begun, time.process_time()
      with contextlib.suppress(OSError):  # The host then counts as silent.
        self._write(stalled / seconds, (cpu - used) / seconds / os.cpu_count())
      begun, stalled, used = now, 0.0, cpu
      if self.tell:
        self._look()

  def _write(self, stalled: float, cpu: float) -> None:
    row = {"time": time.time() + self.ahead_s, "role": self.role}
    row |= {"stalled": stalled, "cpu_usage": cpu}
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    row |= {_MEMORY: pages / os.sysconf("SC_PHYS_PAGES")} | _device_memory()
    file = self.folder / _SAMPLES / f"{self.name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
      out.write(json.dumps(row) + "\n")

  def _look(self) -> None:
    found = suspects(self.folder, self.every_s)
    if self.saving():
      found = {k: v for k, v in found.items() if v.metric != _MEMORY}
    self._suspects, now = found, time.monotonic()
    self._of_step |= found
    new = {k for k in found if now - self._seen.get(k, -_QUIET_S) >= _QUIET_S}
    self._seen |= dict.fromkeys(found, now)
    for line in describe({name: found[name] for name in new}):
      self.tell(line)


def _device_memory() -> dict[str, float]:
  """Returns the memory usage of the fullest device, if devices report it."""
  import jax

  every = [device.memory_stats() or {} for device in jax.local_devices()]
  used = [
    x["bytes_in_use"] / x["bytes_limit"] for x in every if "bytes_limit" in x
  ]
  return {"device_memory_usage": max(used)} if used else {}
