"""From scores to an alarm: one host, one metric, minutes without a break."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.fleet import scores as scores_lib

FEWEST = 3  # Hosts; of two that differ nobody knows which one is broken.


class Alarm(NamedTuple):
  """A host that has been unlike the others for long enough."""

  host: int
  metric: int
  since: float  # Seconds, when it was first unlike them.
  until: float  # Seconds, when the alarm was raised.
  score: float  # Then.


class Watch(NamedTuple):
  """The state of an alarm: the suspect of each metric; no clock."""

  suspects: np.ndarray  # int [K]; -1 is none.
  since: np.ndarray  # float [K], seconds.

  @classmethod
  def begin(cls, metrics: int) -> "Watch":
    """Nobody is suspected."""
    return cls(np.full(metrics, -1), np.zeros(metrics))


def watch(
  state: Watch,
  scores: np.ndarray,
  now: float,
  *,
  threshold: float,
  hold_s: float,
) -> tuple[Watch, list[Alarm]]:
  """Looks once more at the fleet; a pure function.

  The suspect of a metric is the host with its highest score, if that is over
  the threshold. Another suspect, or none, begins anew.

  Args:
    state: from the look before.
    scores: float [H, K].
    now: seconds.
    threshold: score from which on a host is suspected.
    hold_s: seconds without a break after which a suspect is an alarm.

  Returns:
    The state after it, and an alarm for each metric that has one now, in the
    order of the metrics.
  """
  top = scores.argmax(axis=0)
  height = np.take_along_axis(scores, top[None], axis=0)[0]
  suspects = np.where(height > threshold, top, -1)
  since = np.where(suspects == state.suspects, state.since, now)
  due = (suspects >= 0) & (now - since >= hold_s)
  alarms = [
    Alarm(int(suspects[k]), int(k), float(since[k]), now, float(height[k]))
    for k in np.flatnonzero(due)
  ]
  return Watch(suspects, since), alarms


def detect(
  x: np.ndarray,
  *,
  roles: Sequence[str],
  score: Callable[[np.ndarray], np.ndarray] = scores_lib.median_scores,
  threshold: float = scores_lib.THRESHOLD,
  hold_s: float = 240.0,
  order: Sequence[int] | None = None,
) -> list[Alarm]:
  """The first alarm of each role, by the metric that comes first in the order.

  Args:
    x: float [H, S, K], a sample a second, NaN where nothing arrived.
    roles: of the hosts [H]; a host is compared with those of its role alone.
    score: [h, S, K] of one role without NaN -> [T, h, K], the last at the end.
    threshold: as of `watch`.
    hold_s: as of `watch`.
    order: metrics by how well they tell a broken host, best first; those of
      one moment are told apart by it. By default as they are.

  Returns:
    At most one alarm a role; none for a role of fewer than three hosts.
  """
  order = np.arange(x.shape[2]) if order is None else np.asarray(order)
  alarms = []
  for hosts in _compared(roles):
    found = score(scores_lib.fill_gaps(x[hosts][..., order]))
    end = x.shape[1]
    times = np.linspace(min(scores_lib.MEAN_S, end), end, len(found))
    state = Watch.begin(found.shape[2])
    for now, looked in zip(times, found):
      state, raised = watch(
        state, looked, float(now), threshold=threshold, hold_s=hold_s
      )
      if raised:
        first = raised[0]
        host, metric = int(hosts[first.host]), int(order[first.metric])
        alarms.append(first._replace(host=host, metric=metric))
        break
  return alarms


def _compared(roles: Sequence[str]) -> list[np.ndarray]:
  """The hosts of each role that has enough of them."""
  groups = [
    np.flatnonzero([name == role for name in roles])
    for role in dict.fromkeys(roles)
  ]
  return [hosts for hosts in groups if hosts.size >= FEWEST]


def slow_hosts(
  seconds: np.ndarray,
  steps: np.ndarray,
  *,
  roles: Sequence[str],
  ratio: float = 1.5,
  hold_s: float = 20.0,
) -> list[Alarm]:
  """Hosts that take longer than the others for the phases of a step.

  A phase in which hosts wait for each other is equally long on all of them, and
  names nobody: give the time without waiting.

  Args:
    seconds: float [H, N, P], of hosts, steps and phases; NaN where a step has
      no such phase. Those under a twentieth of a step count as one.
    steps: float [H, N], seconds of the whole steps.
    roles: of the hosts [H], as of `detect`.
    ratio: times the median host's from which on a host is slow.
    hold_s: seconds of such steps, at least three and one after the other, that
      make an alarm.

  Returns:
    An alarm for each slow host, of its slowest phase; `since` and `until` count
    seconds of its own steps.
  """
  seconds = np.nan_to_num(np.asarray(seconds, np.float64))
  alarms = []
  for hosts in _compared(roles):
    matters = 0.05 * np.median(steps[hosts], axis=0)[:, None]
    usual = np.maximum(np.median(seconds[hosts], axis=0), matters)  # [N, P]
    for host in hosts:
      slower = seconds[host] / usual
      phase = int(slower[-1].argmax())
      fine = np.flatnonzero(slower[:, phase] < ratio)
      first = int(fine[-1]) + 1 if fine.size else 0
      ends = np.cumsum(steps[host])
      since = float(ends[first - 1]) if first else 0.0
      if len(slower) >= first + 3 and ends[-1] - since >= hold_s:
        found = float(np.median(slower[-3:, phase]))
        alarms.append(Alarm(int(host), phase, since, float(ends[-1]), found))
  return alarms
