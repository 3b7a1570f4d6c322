"""Raises alarms for hosts whose scores stay high for minutes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.fleet import scores as scores_lib

# Metrics that best reveal a faulty host, best first (Minder, section 4.3).
PRIORITY = (
  "pfc_tx_rate",
  "cpu_usage",
  "gpu_duty_cycle",
  "gpu_power",
  "gpu_graphics",
  "gpu_tensor",
  "nvlink_bandwidth",
)

# Fraction of the highest score in a role below which a host is not named: the
# fault may have spread to it, or the job reacts to the fault.
SHARE = 0.5
KEEP = 0.75  # Fraction of the threshold above which a suspicion lasts.
FEWEST = 3  # Minimum number of hosts; of two, either could be the faulty one.


class Alarm(NamedTuple):
  """A host that has differed from the others for long enough."""

  host: int
  metric: int | str  # Its name, or its index if metrics have no names.
  since: float  # Seconds, when the host began to differ.
  until: float  # Seconds, when the alarm was raised.
  score: float  # Score at `until`.


def watch(
  since: np.ndarray,
  scores: np.ndarray,
  now: float,
  *,
  threshold: float,
  hold_s: float,
) -> tuple[np.ndarray, list[Alarm]]:
  """Updates suspicions with the scores at one time; a pure function.

  Args:
    since: float [H, K], time in seconds at which each metric of a host became
      suspect; NaN where it is not suspect.
    scores: float [H, K].
    now: seconds.
    threshold: score above which a suspicion begins. It lasts as long as the
      score stays above `KEEP` of the threshold.
    hold_s: seconds that a suspicion must last to raise an alarm.

  Returns:
    The new `since`, and an alarm for each suspicion that has lasted this long,
    sorted by host and then by metric.
  """
  suspected = ~np.isnan(since)
  over = scores > np.where(suspected, KEEP * threshold, threshold)
  since = np.where(over, np.where(suspected, since, now), np.nan)
  alarms = [
    Alarm(int(h), int(k), float(since[h, k]), now, float(scores[h, k]))
    for h, k in np.argwhere(now - since >= hold_s)
  ]
  return since, alarms


def detect(
  data: np.ndarray,
  metrics: Sequence[str] | None = None,
  roles: Sequence[str] | None = None,
  *,
  score: Callable[[np.ndarray], np.ndarray] = scores_lib.median_scores,
  threshold: float = scores_lib.THRESHOLD,
  hold_s: float = 240.0,
) -> list[Alarm]:
  """Finds the faulty hosts of a fleet.

  Args:
    data: float [H, S, K], one sample per second, NaN where nothing arrived.
    metrics: names [K]. If several metrics raise an alarm at the same time, the
      alarm has the one that comes first in `PRIORITY`; unknown names are last.
    roles: roles [H]; hosts are compared within their role. One role by default.
    score: data of one role [h, S, K] -> scores [T, h, K], the last of which is
      at the end of the data.
    threshold: see `watch`.
    hold_s: see `watch`.

  Returns:
    The first alarm of each faulty host, sorted by time; none for a role with
    fewer than three hosts. `metric` is a name if metrics have names. Hosts of
    a role whose score, over the time of the alarm, is far below the highest
    (`SHARE`) are left out.

  Raises:
    InputError: shapes and names do not agree.
  """
  data = np.asarray(data)
  names = range(data.shape[-1]) if metrics is None else metrics
  roles = [""] * len(data) if roles is None else roles
  fits = data.ndim == 3 and data.shape[::2] == (len(roles), len(names))
  if not (fits and data.size):
    raise InputError(
      f"fleet.detect: data of shape {data.shape}, {len(roles)} roles and"
      f" {len(names)} metrics; give [hosts, seconds, metrics], a role per host"
      " and a name per metric"
    )
  ranks = {name: rank for rank, name in enumerate(PRIORITY)}
  order = np.argsort([ranks.get(n, np.inf) for n in names], kind="stable")
  alarms = []
  for hosts in _compared(roles):
    found = score(data[hosts][..., order])
    end = data.shape[1]
    times = np.linspace(min(scores_lib.MEAN_S, end), end, len(found))
    since = np.full(found.shape[1:], np.nan)
    first = {}
    for now, scores in zip(times, found):
      since, raised = watch(
        since, scores, float(now), threshold=threshold, hold_s=hold_s
      )
      for alarm in raised:
        first.setdefault(alarm.host, alarm)
    sizes = [
      np.median(found[(times >= a.since) & (times <= a.until), a.host], 0).max()
      for a in first.values()
    ]
    for alarm, size in zip(first.values(), sizes):
      if size >= SHARE * max(sizes):
        host, metric = int(hosts[alarm.host]), names[order[alarm.metric]]
        alarms.append(alarm._replace(host=host, metric=metric))
  return sorted(alarms, key=lambda alarm: alarm.until)


def _compared(roles: Sequence[str]) -> list[np.ndarray]:
  """Returns the hosts of each role that has enough of them."""
  every = np.asarray(roles)
  groups = [np.flatnonzero(every == role) for role in dict.fromkeys(roles)]
  return [hosts for hosts in groups if hosts.size >= FEWEST]


def slow_hosts(
  seconds: np.ndarray,
  steps: np.ndarray,
  *,
  roles: Sequence[str],
  ratio: float = 1.5,
  hold_s: float = 20.0,
) -> list[Alarm]:
  """Returns hosts that take longer than the others for the phases of a step.

  Phases in which hosts wait for each other take equally long on all hosts; pass
  times without waiting.

  Args:
    seconds: float [H, N, P], durations by host, step and phase; NaN where a
      step has no such phase. Hosts are compared with the median host's
      duration, or a twentieth of a step if that is longer.
    steps: float [H, N], seconds of the whole steps.
    roles: roles of the hosts [H], as in `detect`.
    ratio: a host is slow from this multiple of that duration.
    hold_s: seconds of consecutive slow steps, at least four, that raise an
      alarm.

  Returns:
    An alarm for each slow host, with its slowest phase; `since` and `until` are
    in seconds of the host's own steps.
  """
  seconds = np.nan_to_num(np.asarray(seconds, np.float64))
  alarms = []
  for hosts in _compared(roles) if seconds.size else ():
    matters = 0.05 * np.median(steps[hosts], axis=0)[:, None]
    usual = np.maximum(np.median(seconds[hosts], axis=0), matters)  # [N, P]
    for host in hosts:
      ends, found = np.cumsum(steps[host]), []
      for phase, slower in enumerate((seconds[host] / usual).T):
        fine = np.flatnonzero(slower < ratio)
        first = int(fine[-1]) + 1 if fine.size else 0
        since = float(ends[first - 1]) if first else 0.0
        if len(slower) >= first + 4 and ends[-1] - since >= hold_s:
          score = float(np.median(slower[-3:]))
          found.append(Alarm(int(host), phase, since, float(ends[-1]), score))
      if found:
        alarms.append(max(found, key=lambda alarm: alarm.score))
  return alarms
