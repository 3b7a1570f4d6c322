"""Simulates second-by-second records of fleets with at most one fault.

The kinds of faults, their frequencies, and the spread of some faults to other
hosts within seconds follow Minder (arXiv 2411.01791). The sizes do not: a fault
moves each affected metric by 3 to 8 standard deviations of the per-second
noise. In the same unit, healthy hosts differ permanently by up to 60, depending
on the metric; they drift apart by 1 within 15 minutes, follow the daily cycle
with factors of 0.7 to 1.3, and deviate from the others by 8 for up to 100
seconds (tails of rollouts, bursts). The hard profile doubles noise, bursts,
drifts and differences, but not the faults. Faults begin after three minutes,
because the detector uses these as its baseline.
"""

from typing import NamedTuple

import numpy as np
from helpers import cases

METRICS = 21


class Kind(NamedTuple):
  """A kind of fault."""

  share: float  # Fraction of all faults (Minder, table 1).
  metrics: tuple[int, ...]  # Metrics that it can affect,
  reach: float  # with this probability each; at least one.
  down: float  # Probability that a metric falls.
  spread: float = 0.0  # Effect on other hosts, from 10 s later on.


KINDS = {k: Kind(*row) for k, row in cases.load("fleets")["kinds"].items()}
SHAPES = ("step", "ramp", "intermittent", "drop")


class Episode(NamedTuple):
  """Metrics of a fleet over a quarter of an hour."""

  x: np.ndarray  # float32 [H, S, K], NaN where nothing arrived.
  roles: tuple[str, ...]
  host: int  # The broken host; -1 if there is none.
  onset: int  # Second at which it breaks.
  kind: str
  also: tuple[int, ...] = ()  # Other broken hosts.
  names: tuple[str, ...] | None = None  # Names of the metrics.


def episode(
  seed: int, *, hosts: int, faulty: bool, hard: bool = False
) -> Episode:
  """Draws an episode, determined by its arguments.

  Args:
    seed: random seed.
    hosts: number of hosts.
    faulty: whether one host breaks.
    hard: whether to use the hard profile.
  """
  rng = np.random.default_rng((20241102, seed))
  more, seconds = (2.0 if hard else 1.0), 900
  roles = _roles(rng, hosts)
  x = _healthy(rng, roles, seconds, more)
  host, onset, kind = -1, 0, ""
  if faulty:
    host = int(rng.integers(hosts))
    onset = int(rng.integers(180, seconds - 420))
    names = list(KINDS)
    shares = np.array([KINDS[name].share for name in names])
    kind = names[rng.choice(len(names), p=shares / shares.sum())]
    shape = SHAPES[rng.integers(len(SHAPES))]
    _break(rng, x, roles, host, onset, KINDS[kind], shape)
  # Single samples, and entire hosts for some seconds, are missing.
  x[rng.random(x.shape, np.float32) < 0.01] = np.nan
  for _ in range(rng.poisson(0.2 * hosts)):
    start = rng.integers(seconds)
    x[rng.integers(hosts), start : start + rng.integers(5, 30)] = np.nan
  return Episode(x, roles, host, onset, kind)


def _roles(rng: np.random.Generator, hosts: int) -> tuple[str, ...]:
  """Draws roles: trainers only, or half samplers and some reward hosts."""
  if hosts < 12 or rng.random() < 0.5:
    return ("trainer",) * hosts
  rewards = max(3, hosts // 16)
  samplers = (hosts - rewards) // 2
  trainers = hosts - rewards - samplers
  counts = {"trainer": trainers, "sampler": samplers, "reward": rewards}
  return tuple(role for role, n in counts.items() for _ in range(n))


def _healthy(rng, roles, seconds, more) -> np.ndarray:
  """Draws metrics in units of the per-second noise of the normal profile."""
  hosts, metrics = len(roles), METRICS
  x = _noise(rng, hosts, seconds) * more
  time = np.arange(seconds)
  # Hosts differ permanently, by more in some metrics, and drift apart slowly.
  far = np.exp(rng.uniform(np.log(0.5), np.log(60), metrics)) * more
  offsets = rng.uniform(-far, far, (hosts, metrics))
  slopes = rng.normal(0, 0.5 * more, (hosts, metrics))
  slopes *= rng.random(metrics) < 0.3
  drifts = slopes[:, None] * (time / seconds)[:, None]
  x += (offsets[:, None] + drifts).astype(np.float32)
  # All hosts follow the daily cycle, some by up to a third more.
  day = np.sin(2 * np.pi * (time / 86400 + rng.random())) * 60
  day = (day - day[0])[:, None] * rng.uniform(-1, 1, metrics)
  x += (day * rng.uniform(0.7, 1.3, (hosts, 1, 1))).astype(np.float32)
  for role in dict.fromkeys(roles):
    mine = np.flatnonzero([name == role for name in roles])
    # Effects of the job on all hosts: steps, drifts, a common pause.
    period, phase = rng.uniform(8, 90), rng.uniform(0, 7)
    wave = np.sign(np.sin(2 * np.pi * time / period + phase))
    drift = rng.normal(0, 3, metrics) * (time / seconds)[:, None]
    common = wave[:, None] * rng.normal(0, 3, metrics) + drift
    if rng.random() < 0.5:
      start = rng.integers(seconds)
      pause = slice(start, start + rng.integers(20, 120))
      common[pause] -= np.abs(rng.normal(0, 8, metrics))
    x[mine] += (20 + rng.normal(0, 5, metrics) + common).astype(np.float32)
    if role == "sampler":  # Finished hosts wait for the others.
      for start in range(0, seconds, 180):
        for host in mine[rng.random(mine.size) < 0.7]:
          end = start + 180
          idle = slice(end - int(rng.integers(10, 100)), end)
          x[host, idle, 2:7] -= 8.0
  for _ in range(rng.poisson(0.5 * hosts * more)):  # Bursts.
    start, length = rng.integers(seconds), rng.integers(5, 60)
    metric = rng.integers(metrics)
    size = rng.uniform(3, 8) * rng.choice([-1, 1])
    x[rng.integers(hosts), start : start + length, metric] += size
  return x


def _noise(rng, hosts, seconds) -> np.ndarray:
  """Draws noise that is correlated over metrics and seconds of a host."""
  metrics = METRICS
  shared = rng.standard_normal((hosts, seconds, 3), np.float32)
  x = rng.standard_normal((hosts, seconds, metrics), np.float32) * 0.8
  x += shared @ rng.normal(0, 0.35, (3, metrics)).astype(np.float32)
  for t in range(1, seconds):
    x[:, t] = 0.5 * x[:, t - 1] + 0.866 * x[:, t]
  return x


def red(rng, shape, hangs) -> np.ndarray:
  """Draws noise of variance 1 that is autocorrelated along axis 1."""
  x = rng.standard_normal(shape, np.float32)
  for t in range(1, shape[1]):
    x[:, t] = hangs * x[:, t - 1] + np.sqrt(1 - hangs**2) * x[:, t]
  return x


def _break(rng, x, roles, host, onset, kind, shape) -> None:
  """Adds a fault to a record, in place."""
  left = x.shape[1] - onset
  time = np.arange(left)
  course = np.ones(left)
  if shape == "ramp":
    course = np.clip(time / rng.uniform(30, 120), 0, 1)
  elif shape == "intermittent":
    course = (time % rng.uniform(10, 40) / 40 < rng.uniform(0.5, 0.9)) * 1.0
  reached = [k for k in kind.metrics if rng.random() < kind.reach]
  for metric in reached or [int(rng.choice(kind.metrics))]:
    size = rng.uniform(3, 8) * (-1 if rng.random() < kind.down else 1)
    if shape == "drop":  # Stuck at one level, with half of the samples.
      x[host, onset:, metric] = x[host, onset, metric] + size
      x[host, onset:, metric][rng.random(left) < 0.5] = np.nan
    else:
      x[host, onset:, metric] += (size * course).astype(np.float32)
    others = [i for i, r in enumerate(roles) if r == roles[host] and i != host]
    x[others, onset + 10 :, metric] += kind.spread * size
