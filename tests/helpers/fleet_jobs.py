"""Two simulators of fleets whose jobs stop, start and restart.

Metrics are positive and in physical units. Healthy hosts differ permanently by
factors, 3 to 20 % for some or all hosts, depending on the fleet; some of these
differences begin in mid-record. A fault changes some metrics of a host by a
factor, sometimes spreads to a few other hosts, and often stops the job, after
which all hosts are idle. The hard profile doubles noise, bursts and the number
of differences that begin.

Settings of the detector may be chosen on `jobs`. `sites` was looked at during
development. It differs in metrics,
noise, course of jobs, and shapes of faults.
"""

import numpy as np
from helpers import cases, fleets
from helpers.fleets import Episode

_CASES = cases.load("fleets")
_JOBS, _JOBS_FAULTS = _CASES["jobs"], _CASES["jobs_faults"]
_SITES, _SITES_FAULTS = _CASES["sites"], _CASES["sites_faults"]


def jobs(seed: int, *, hosts: int, faulty: bool, hard: bool) -> Episode:
  """Draws 15 minutes of a job."""
  rng = np.random.default_rng((51, seed))
  more, seconds = (2.0 if hard else 1.0), 900
  count = int(rng.integers(4, len(_JOBS) + 1))
  names = [*rng.permutation([*_JOBS])[:count]]
  work, idle, share, follows = np.array([_JOBS[name] for name in names]).T
  time = np.arange(seconds)
  broken, onsets, kind, faults = _draw_faults(
    rng, names, hosts, faulty, _JOBS_FAULTS, seconds
  )
  on = _job_course(rng, time, onsets)
  # [S, K]: phases of steps, then the daily cycle.
  phase = time / rng.uniform(10, 150) % 1 < rng.uniform(0.4, 0.8)
  level = work * (1 - follows * ~phase[:, None] * rng.uniform(0.3, 1))
  day = np.sin(2 * np.pi * (time / 86400 + rng.random()))[:, None]
  level = idle + (level - idle) * on[:, None]
  level *= 1 + rng.uniform(0, 0.3, count) * (day - day[0])
  x = fleets.red(rng, (hosts, seconds, count), rng.uniform(0, 0.7))
  x *= (share * more).astype(np.float32)
  x = (1 + x) * level.astype(np.float32)
  x += rng.normal(0, 0.002 * work, x.shape).astype(np.float32)
  x *= (1 + _differences(rng, hosts, count))[:, None].astype(np.float32)
  for _ in range(rng.poisson(0.3 * more)):  # Differences that begin.
    host, start = rng.integers(hosts), rng.integers(60, seconds)
    some = rng.permutation(count)[: rng.integers(1, 3)]
    sizes = rng.choice([-1, 1], some.size) * rng.uniform(0.03, 0.2, some.size)
    x[host, start:, some] *= 1 + sizes[:, None]
  for _ in range(rng.poisson(0.2 * hosts * more)):  # Bursts.
    start = rng.integers(seconds)
    burst = slice(start, start + rng.integers(5, 100))
    x[rng.integers(hosts), burst, rng.integers(count)] *= rng.uniform(0.4, 2)
  for host, onset, (metrics, spread) in zip(broken, onsets, faults):
    left = seconds - onset
    course = _jobs_shape(rng, left)
    peers = []
    if rng.random() < spread:
      others = np.setdiff1d(np.arange(hosts), broken)
      peers = rng.permutation(others)[: rng.integers(1, max(2, hosts // 4))][:6]
    for k, factor in metrics.items():
      if kind == "silent":
        x[host, onset:, k] = np.nan
        continue
      x[host, onset:, k] *= 1 + (factor - 1) * course
      for peer in peers:
        late, part = int(rng.integers(5, 60)), rng.uniform(0.1, 0.4)
        x[peer, onset + late :, k] *= 1 + (factor - 1) * part
  np.maximum(x, 0, out=x)
  for name, most in (("gpu_duty_cycle", 100), ("gpu_graphics", 100)):
    if name in names:
      x[..., names.index(name)] = x[..., names.index(name)].clip(None, most)
  _lose(rng, x, rng.uniform(0, 0.03))
  return Episode(
    x.astype(np.float32),
    ("",) * hosts,
    *(broken[0], onsets[0], kind) if broken else (-1, 0, ""),
    also=tuple(broken[1:]),
    names=tuple(names),
  )


def _draw_faults(rng, names, hosts, faulty, every, seconds):
  """Draws hosts, onsets, the kind, and metrics with factors of each fault."""
  if not faulty:
    return [], [], "", []
  usable = [k for k, (_, m, _) in every.items() if set(m) & set(names)]
  shares = np.array([every[k][0] for k in usable])
  kind = str(rng.choice(usable, p=shares / shares.sum()))
  number = 1
  if hosts >= 16 and rng.random() < 0.1:
    number = int(rng.integers(2, 4))
  broken = [int(h) for h in rng.permutation(hosts)[:number]]
  first = int(rng.integers(180, seconds - 400))
  onsets = [first + int(rng.integers(0, 60)) * (i > 0) for i in range(number)]
  _, ranges, spread = every[kind]
  faults = []
  for _ in broken:
    found = [name for name in names if name in ranges]
    reached = [name for name in found if rng.random() < 0.6]
    reached = found if kind == "silent" else reached or [rng.choice(found)]
    drawn = {names.index(n): rng.uniform(*ranges[n]) for n in reached}
    faults.append((drawn, spread))
  return broken, onsets, kind, faults


def _job_course(rng, time, onsets):
  """Draws how busy the job is, from 0 to 1, [S]."""
  on, seconds = np.ones(time.size), time.size
  event = rng.choice(["", "pause", "late", "end"], p=[0.6, 0.2, 0.1, 0.1])
  if onsets:
    event = rng.choice(["", "pause", "stop", "restart"], p=[0.3, 0.1, 0.4, 0.2])
  start = int(rng.integers(60, seconds - 120))
  length = int(rng.integers(30, 200))
  if event == "pause":
    on[start : start + length] = 0
  elif event == "late":
    on[: 30 + length] = 0
  elif event == "end":
    on[start:] = 0
  elif event in ("stop", "restart"):
    stop = max(onsets) + int(rng.integers(20, 400))
    on[stop:] = 0
    if event == "restart":
      on[stop + 40 + length :] = 1
  return on


def _differences(rng, hosts, metrics):
  """Draws permanent differences as fractions of the level, [H, K]."""
  odd = rng.random((hosts, metrics)) < rng.choice([0.05, 0.2, 1.0])
  odd = odd * rng.uniform(0.03, 0.2, odd.shape) * rng.choice([-1, 1], odd.shape)
  return odd + rng.normal(0, rng.uniform(0.002, 0.03, metrics), odd.shape)


def _jobs_shape(rng, left):
  """Draws the course of a fault, [S]."""
  time = np.arange(left)
  shape = rng.choice(["step", "ramp", "intermittent"], p=[0.6, 0.2, 0.2])
  if shape == "ramp":
    return np.clip(time / rng.uniform(20, 120), 0, 1)
  if shape == "intermittent":
    return (time / rng.uniform(8, 40) % 1 < rng.uniform(0.6, 0.9)) * 1.0
  return np.ones(left)


def _lose(rng, x, share) -> None:
  """Removes single samples, and whole hosts for some seconds, in place."""
  x[rng.random(x.shape, np.float32) < share] = np.nan
  for _ in range(rng.poisson(0.15 * len(x))):
    start = rng.integers(x.shape[1])
    x[rng.integers(len(x)), start : start + rng.integers(5, 50)] = np.nan


def sites(seed: int, *, hosts: int, faulty: bool, hard: bool) -> Episode:
  """Draws 14 to 17 minutes of a job whose hosts stop one after another."""
  rng = np.random.default_rng((910, seed))
  more, seconds = (2.0 if hard else 1.0), int(rng.integers(840, 1020))
  count = int(rng.integers(4, len(_SITES) + 1))
  names = [*rng.permutation([*_SITES])[:count]]
  levels = np.array([_SITES[name] for name in names])  # [K, 3]
  time = np.arange(seconds)
  broken, onsets, kind, faults = _draw_faults(
    rng, names, hosts, faulty, _SITES_FAULTS, seconds
  )
  state = np.zeros(seconds, int)  # 0 works, 1 hangs, 2 is idle.
  if onsets and rng.random() < 0.6:
    hang = max(onsets) + int(rng.integers(10, 300))
    state[hang:] = 1
    state[hang + int(rng.integers(60, 400)) :] = 2
  elif rng.random() < 0.3:
    start = int(rng.integers(0, seconds))
    state[start : start + int(rng.integers(40, 260))] = 2
  late = rng.integers(0, 25, hosts)
  of_host = state[np.maximum(time - late[:, None], 0)]  # [H, S]
  x = levels.T[of_host].astype(np.float32)
  period = rng.uniform(20, 240)
  saw = (time / period + rng.random()) % 1
  swing = rng.uniform(0, 0.6, count) * (rng.random(count) < 0.7)
  x *= (1 - swing * (saw**2)[:, None]).astype(np.float32)
  hour = np.cos(2 * np.pi * (time / 86400 + rng.random()))
  slope = (hour - hour[0])[:, None] * rng.uniform(-0.3, 0.3, count)
  x *= (1 + slope * rng.uniform(0.8, 1.2, (hosts, 1, 1))).astype(np.float32)
  # Noise has heavy tails and a size per host and metric.
  size = np.exp(rng.uniform(np.log(0.004), np.log(0.08), count)) * more
  size = size * np.exp(rng.normal(0, 0.2, (hosts, 1, count)))
  noise = rng.standard_t(4, x.shape).astype(np.float32) * size / 1.414
  for t in range(1, seconds):
    noise[:, t] += np.float32(0.4) * (noise[:, t - 1] - noise[:, t])
  x *= np.exp(noise.clip(-1.5, 1.5)).astype(np.float32)
  x += (levels[:, 0] * 0.003 * rng.standard_normal(x.shape)).astype(np.float32)
  spread = rng.uniform(0.03, 0.1) * rng.random(count)
  bias = rng.normal(0, spread, (hosts, count)).clip(-0.2, 0.2)
  x *= np.exp(bias)[:, None].astype(np.float32)
  for _ in range(rng.poisson(0.25 * more)):  # Differences that begin.
    host, start = rng.integers(hosts), int(rng.integers(30, seconds))
    grown = np.clip((time - start) / rng.uniform(1, 200), 0, 1)
    k, size = rng.integers(count), rng.uniform(-0.2, 0.2)
    x[host, :, k] *= 1 + size * grown
  for host in np.flatnonzero(rng.random(hosts) < 0.15 * more):  # Bursts.
    start, length = rng.integers(seconds), rng.integers(10, 120)
    some = rng.random(count) < 0.3
    x[host, start : start + length, some] *= np.exp(rng.normal(0, 0.4))
  for host, onset, (metrics, spreads) in zip(broken, onsets, faults):
    left = seconds - onset
    frozen, lossy = rng.random() < 0.08, rng.random() < 0.1
    peers = np.setdiff1d(np.arange(hosts), broken)
    number = rng.integers(1, max(2, hosts // 5)) * (rng.random() < spreads)
    peers = rng.permutation(peers)[: min(number, 8)]
    for k, factor in metrics.items():
      course = _sites_shape(rng, left)
      if frozen:
        x[host, onset:, k] = x[host, onset, k] * factor
      else:
        x[host, onset:, k] *= 1 + (factor - 1) * course
      for peer in peers:
        part, slow = rng.uniform(0.1, 0.45), rng.uniform(10, 60)
        part *= 1 - np.exp(-np.arange(left) / slow)
        x[peer, onset:, k] *= 1 + (factor - 1) * part
    if lossy:
      x[host, onset:][rng.random((left, count)) < rng.uniform(0.6, 1)] = np.nan
  np.maximum(x, 0, out=x)
  _lose(rng, x, rng.uniform(0, 0.06))
  return Episode(
    x.astype(np.float32),
    ("",) * hosts,
    *(broken[0], onsets[0], kind) if broken else (-1, 0, ""),
    also=tuple(broken[1:]),
    names=tuple(names),
  )


def _sites_shape(rng, left):
  """Draws the course of a fault, [S]."""
  time = np.arange(left)
  shape = rng.choice(["approach", "two steps", "flapping", "saw"])
  if shape == "approach":
    return 1 - np.exp(-time / rng.uniform(5, 60))
  if shape == "two steps":
    return 0.6 + 0.4 * (time > rng.uniform(20, 90))
  if shape == "flapping":
    return (time / rng.uniform(20, 60) % 1 < rng.uniform(0.7, 0.9)) * 1.0
  return 0.6 + 0.4 * (time / rng.uniform(15, 60) % 1)
