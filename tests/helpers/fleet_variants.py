"""Two more simulators of fleets, independent of `fleets` and of each other.

A detector that was tuned on one simulator may be overfitted to it.
`units` draws metrics in physical units, whose hosts differ by a factor of their
level; settings may be chosen on it. `unseen` has heavy tails, drifting levels,
quantised counters and other faults; one setting, the least difference, was
checked on it. Both draw faults of 3 to 8 standard deviations of the per-second
noise; the hard profile doubles noise, drifts, bursts and differences between
hosts.
"""

import numpy as np
from helpers.fleets import Episode

# Name, level, noise and load dependence as fractions of the level.
_UNITS = (
  ("cpu_usage", 55.0, 0.03, 0.5),
  ("pfc_tx_rate", 900.0, 0.05, 0.8),
  ("gpu_duty_cycle", 90.0, 0.02, 0.4),
  ("gpu_power", 420.0, 0.02, 0.5),
  ("gpu_graphics", 80.0, 0.03, 0.4),
  ("gpu_tensor", 45.0, 0.04, 0.6),
  ("nvlink_bandwidth", 180.0, 0.05, 0.8),
  ("memory_usage", 61.0, 0.004, 0.0),
  ("tcp_throughput", 35.0, 0.08, 0.3),
  ("rdma_throughput", 250.0, 0.04, 0.8),
  ("disk_usage", 47.0, 0.004, 0.0),
  ("disk_throughput", 120.0, 0.06, 0.1),
  ("gpu_temperature", 68.0, 0.004, 0.02),
  ("gpu_clock", 1700.0, 0.01, 0.05),
  ("hbm_usage", 70.0, 0.005, 0.01),
  ("pcie_bandwidth", 22.0, 0.05, 0.6),
)
_TOGETHER = ((0, 8, 11), (2, 3, 4, 5, 13), (1, 6, 9, 15), (7, 14), (10, 12))
_UNITS_FAULTS = ("shift", "ramp", "stuck", "dropout", "bursts", "jitter")


def units(seed: int, *, hosts: int, faulty: bool, hard: bool) -> Episode:
  """Draws 15 minutes in physical units; hosts differ by factors."""
  rng = np.random.default_rng((15, seed))
  more, seconds = (2.0 if hard else 1.0), 900
  roles = tuple(
    "trainer" if i % 3 or hosts < 16 else "sampler" for i in range(hosts)
  )
  level, share, follows = (np.array(c) for c in list(zip(*_UNITS))[1:])
  noise = (level * share).astype(np.float32)
  bias = rng.uniform(-0.15, 0.15, (hosts, len(level))) * more
  bias *= rng.random(len(level)) ** 2  # Some metrics hardly differ.
  time = np.arange(seconds)
  x = np.empty((hosts, seconds, len(level)), np.float32)
  for role in sorted(set(roles)):
    mine = [i for i, other in enumerate(roles) if other == role]
    idle = 1 - _load(rng, time)[:, None]
    x[mine] = (level * (1 - follows * idle)).astype(np.float32)
  x *= (1 + bias[:, None]).astype(np.float32)
  x += noise * more * _red(rng, x.shape, rng.uniform(0.0, 0.7))
  # Daily cycle and growth over time differ slightly between hosts.
  hour = rng.uniform(0, 24)
  day = np.sin(2 * np.pi * (hour + time / 3600) / 24) * 24 / (2 * np.pi)
  day = (day - day[0]) * rng.uniform(0, 12) * more  # Noise deviations per hour.
  x[..., 12] += noise[12] * day * rng.uniform(0.7, 1.3, (hosts, 1))
  for k in (7, 10, 14):
    fills = rng.uniform(0, 4) * more * rng.uniform(0.6, 1.4, (hosts, 1))
    x[..., k] += noise[k] * fills * time / 900
  for _ in range(rng.poisson(0.3 * hosts * more)):  # Healthy bursts.
    host, start = rng.integers(hosts), rng.integers(seconds)
    end = start + rng.integers(5, 130)
    for k in _TOGETHER[rng.integers(len(_TOGETHER))]:
      x[host, start:end, k] += noise[k] * rng.uniform(2, 8) * more
  host, onset, kind = -1, 0, ""
  if faulty:
    host, onset = int(rng.integers(hosts)), int(rng.integers(180, 540))
    kind = str(rng.choice(_UNITS_FAULTS))
    group = _TOGETHER[rng.integers(len(_TOGETHER))]
    if rng.random() < 0.4:
      group = (int(rng.choice(group)),)
    _unit_fault(rng, x[host, onset:], noise, group, kind)
  x[rng.random(x.shape, np.float32) < 0.02] = np.nan
  return Episode(x, roles, host, onset, kind)


def _load(rng, time) -> np.ndarray:
  """Returns the load of generation and training; some jobs have a pause."""
  period, duty = rng.uniform(15, 200), rng.uniform(0.3, 0.8)
  load = np.where(time / period % 1 < duty, 1.0, rng.uniform(0.2, 0.9))
  if rng.random() < 0.4:
    start = rng.integers(time.size)
    load[start : start + rng.integers(30, 400)] = 0.1
  return load


def _red(rng, shape, hangs) -> np.ndarray:
  """Draws noise of variance 1 that is autocorrelated along axis 1."""
  x = rng.standard_normal(shape, np.float32)
  for t in range(1, shape[1]):
    x[:, t] = hangs * x[:, t - 1] + np.sqrt(1 - hangs**2) * x[:, t]
  return x


def _unit_fault(rng, x, noise, group, kind) -> None:
  """Breaks one host from its onset on, x [S, K], in place."""
  time = np.arange(len(x))
  quiet = rng.uniform(0.75, 1.0)
  for k in group:
    size = noise[k] * rng.uniform(3, 8) * rng.choice([-1, 1])
    if kind == "shift":
      x[:, k] += size
    elif kind == "ramp":
      x[:, k] += size * np.clip(time / rng.uniform(30, 240), 0, 1)
    elif kind == "stuck":
      x[:, k] = x[0, k]
    elif kind == "dropout":
      x[rng.random(len(x)) < quiet, k] = np.nan
    elif kind == "bursts":
      period, duty = rng.uniform(10, 50), rng.uniform(0.5, 0.9)
      x[:, k] += np.where(time % period < duty * period, size, 0)
    else:
      jumps = rng.standard_normal(len(x)) * rng.uniform(8, 15)
      x[:, k] += noise[k] * jumps


_UNSEEN_FAULTS = (
  *("two steps", "approach", "sawtooth", "square wave"),
  *("frozen", "silent", "factor", "swap of levels"),
)


def unseen(seed: int, *, hosts: int, faulty: bool, hard: bool) -> Episode:
  """Draws 12 to 18 minutes of a fleet with unnamed metrics."""
  rng = np.random.default_rng((777, seed))
  more, seconds = (2.0 if hard else 1.0), int(rng.integers(720, 1080))
  metrics = int(rng.integers(8, 25))
  kinds = 1 if hosts < 9 else int(rng.integers(1, 4))
  roles = tuple("abc"[i * kinds // hosts] for i in range(hosts))
  # Per-second noise has heavy tails and a scale per host and metric.
  x = rng.standard_t(4, (hosts, seconds, metrics)).astype(np.float32) / 1.414
  loud = np.exp(rng.normal(0, 0.15, (hosts, 1, metrics))).astype(np.float32)
  kept = rng.uniform(0, 0.75, metrics).astype(np.float32)
  for t in range(1, seconds):
    x[:, t] = kept * x[:, t - 1] + np.sqrt(1 - kept**2) * x[:, t]
  x *= loud * more
  # Levels drift slowly and differ permanently, by more in some metrics.
  wander = rng.standard_normal((hosts, seconds // 60 + 2, metrics)).cumsum(1)
  wander *= 0.08 * more * (rng.random(metrics) < 0.5)
  spots = np.arange(seconds) / 60
  left = spots.astype(int)
  part = (spots - left)[:, None]
  x += (wander[:, left] * (1 - part) + wander[:, left + 1] * part).astype("f4")
  far = np.exp(rng.uniform(-2, np.log(25), metrics))
  x += (rng.standard_normal((hosts, 1, metrics)) * far * more).clip(-60, 60)
  common = _common(rng, kinds, seconds, metrics)
  x += common[["abc".index(role) for role in roles]]
  for host in np.flatnonzero(rng.random(hosts) < 0.25 * more):
    start, length = rng.integers(seconds), rng.integers(10, 120)
    some = rng.random(metrics) < 0.3
    x[host, start : start + length, some] += rng.normal(0, 5)
  host, onset, kind = -1, 0, ""
  if faulty:
    host = int(rng.integers(hosts))
    onset = int(rng.integers(180, seconds - 360))
    kind = str(rng.choice(_UNSEEN_FAULTS))
    _unseen_fault(rng, x[host, onset:], kind)
  coarse = np.flatnonzero(rng.random(metrics) < 0.25)
  x[..., coarse] = np.round(x[..., coarse] * 2) / 2
  x[rng.random(x.shape, np.float32) < rng.uniform(0, 0.1)] = np.nan
  for i in np.flatnonzero(rng.random(hosts) < 0.2):
    start = rng.integers(seconds)
    x[i, start : start + rng.integers(5, 60)] = np.nan
  x *= np.exp(rng.normal(0, 3, metrics)).astype(np.float32)
  return Episode(x, roles, host, onset, kind)


def _common(rng, kinds, seconds, metrics) -> np.ndarray:
  """Draws the part that all hosts of a role share, [roles, S, K]."""
  time = np.arange(seconds)[:, None]
  factors = []
  for _ in range(kinds):
    saw = time / rng.uniform(20, 120) % 1 * rng.normal(0, 5, metrics)
    day = np.sin(time * 2 * np.pi / 86400 + rng.uniform(0, 6.3))
    shift = (time > rng.integers(seconds)) * rng.normal(0, 6, metrics)
    level = rng.normal(0, 100, metrics)
    factors.append(saw + day * rng.normal(0, 40, metrics) + shift + level)
  return np.array(factors, np.float32)


def _unseen_fault(rng, x, kind) -> None:
  """Breaks one host from its onset on, x [S, K], in place."""
  time = np.arange(len(x), dtype=np.float32)
  metrics = x.shape[1]
  count = metrics if kind == "silent" else int(rng.integers(1, 5))
  for k in rng.choice(metrics, count, replace=False):
    size = np.float32(rng.uniform(3, 8) * rng.choice([-1, 1]))
    if kind == "two steps":
      x[:, k] += size * (0.5 + 0.5 * (time > rng.uniform(20, 90)))
    elif kind == "approach":
      x[:, k] += size * (1 - np.exp(-time / rng.uniform(10, 80)))
    elif kind == "sawtooth":
      x[:, k] += size * (0.4 + 1.2 * (time / rng.uniform(15, 60) % 1))
    elif kind == "square wave":
      x[:, k] += size * (time / rng.uniform(10, 50) % 1 < rng.uniform(0.6, 0.9))
    elif kind == "frozen":
      x[:, k] = x[0, k]
    elif kind == "silent":
      x[:, k] = np.nan
    elif kind == "factor":
      x[:, k] += size
      x[:, k] += rng.uniform(0.5, 1) * rng.standard_normal(len(x))
    else:
      x[:, k] += size + size * 0.2 * np.sin(time / 20)
