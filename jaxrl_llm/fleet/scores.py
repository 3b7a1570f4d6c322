"""Scores hosts by deviations from the fleet's median and their own baseline."""

import numpy as np

MEAN_S = 60  # Seconds that a deviation is averaged over.
STRIDE_S = 5  # Seconds between scores.
BEGINNING_S = 180  # First seconds of work, which show how healthy hosts differ.
SPREAD = 2.5  # Standard deviations between hosts that count as one of noise.
_FEW = 32  # Hosts x metrics up to which that is enough.
# Fraction of the level that counts as one standard deviation: the largest usual
# difference of a host, within these limits.
LEAST, FLOOR = 0.01, 0.14
# For `median_scores`, chosen on simulated fleets; see docs/reliability.md.
THRESHOLD = 1.6
_ROBUST = 1.4826  # Standard deviation / MAD of a normal distribution.


def fill_gaps(x: np.ndarray) -> np.ndarray:
  """Replaces each missing sample by the same host's nearest in time.

  Args:
    x: float [H, S, K], NaN where nothing arrived. Of two equally near samples
      the earlier one is used. A host that never sent a metric gets the fleet's
      median at every second, or 0 if no host sent it.

  Returns:
    float32 [H, S, K] without NaN.
  """
  filled = np.array(x, np.float32)
  for k in range(x.shape[2]):  # One at a time to save memory.
    if np.isnan(filled[..., k]).any():
      filled[..., k] = _filled(filled[..., k])
  return filled


def _filled(x: np.ndarray) -> np.ndarray:
  """Returns one metric, [H, S], without NaN."""
  missing = np.isnan(x)
  seconds = np.arange(x.shape[1])
  never = 2 * x.shape[1]
  before = np.maximum.accumulate(np.where(missing, -never, seconds), axis=1)
  after = np.where(missing, never, seconds)[:, ::-1]
  after = np.minimum.accumulate(after, axis=1)[:, ::-1]
  near = np.where(seconds - before <= after - seconds, before, after)
  near = np.take_along_axis(x, near.clip(0, x.shape[1] - 1), axis=1)
  filled = np.where(missing, near, x)
  silent = missing.all(axis=1)
  if silent.all():
    return np.zeros_like(x)
  filled[silent] = np.median(filled[~silent], axis=0)
  return filled


def median_scores(x: np.ndarray) -> np.ndarray:
  """Scores how far a host deviates from the fleet and from its own baseline.

  With r_h(t) the residual of a host (`residuals`) and m_h(t) its mean over the
  last minute,

    z_h(t) = max(min(|m_h|, 2 d_h), |m_h| / 8) / max(σ, c · SPREAD · σ(t), f(t))

  where d is the distance of m from the range of the host's half-minute means in
  the baseline: a burst there displaces the norm, and a host that returns to its
  level before the burst is healthy. The scale σ is the noise of single seconds
  over all hosts (1.4826 times the median of |r|), so that a few hosts that
  happen to agree do not make another one look faulty. σ(t) is how far the hosts
  have drifted apart by time t (1.4826 times the median of |m| over hosts); c
  grows with the number of hosts and metrics, the largest of which would exceed
  any fixed limit. f is, for a metric whose hosts differ by factors, the largest
  of their usual differences, up to `FLOOR` of the level, and more after a pause
  in which the level was near 0. A host also gets a score if it becomes still or
  restless (`_activity`), repeats a value or stops sending, and keeps its score
  while the whole fleet is idle (`_kept`).

  Args:
    x: float [H, S, K] of one role, NaN where nothing arrived.

  Returns:
    float32 [T, H, K]: every 5 seconds, from the end of the first minute on.
  """
  tested = max(x.shape[0] * x.shape[2] / _FEW, 1)
  spread = SPREAD * np.sqrt(1 + np.log(tested) / np.log(_FEW))
  # One metric at a time to save memory.
  return np.stack([_scores(x[..., k], spread) for k in range(x.shape[2])], -1)


def residuals(
  x: np.ndarray, first: np.ndarray, floor: np.ndarray
) -> np.ndarray:
  """Returns deviations from the median host beyond the usual ones.

  Healthy hosts differ permanently, by dozens of standard deviations of a
  second's noise. The norm of a host is how it differs from the fleet in the
  first three minutes of work. It is removed before hosts are compared again:
  otherwise the median would be a single host, whose faults would displace all
  others. A norm is either a difference or, for a metric whose hosts differ by
  factors, a multiple of the fleet's level, whichever leaves less: a host that
  needs 10 % more power does so at any level.

  Args:
    x: float [H, S] of one metric, without NaN.
    first: seconds of the baseline, from `baseline`.
    floor: from `baseline`; 0 if hosts do not differ by factors.
  """
  common, usual = np.median(x, axis=0), x[:, first]
  gain = np.ones((len(x), 1))
  expected = common + np.median(usual - common[first], axis=1, keepdims=True)
  if floor.any():
    gain = np.median(usual / common[first], axis=1, keepdims=True)
    left = lambda e: np.mean(np.abs(x - e)[:, ::STRIDE_S])
    expected = min(gain * common, expected, key=left)
  apart = (x - expected).astype(np.float32)
  return (apart - np.median(apart, axis=0)) / np.maximum(gain, 0.5)


def baseline(x: np.ndarray) -> tuple[np.ndarray, ...]:
  """Returns how the hosts of a metric [H, S] are compared.

  Returns:
    The seconds of the baseline, the smallest deviation that counts as a
    standard deviation [T, 1], and when all hosts are idle [T]. It is 0 and
    nobody is idle if hosts do not differ by factors of a positive level.
  """
  common = np.median(x, axis=0)
  means = _means(common[None])
  first = np.arange(min(BEGINNING_S, common.size))
  # The job may end or begin at any time; its level may be high for seconds.
  level = max(np.median(common[first]), np.percentile(common, 80))
  absolute = first, 0 * means, means[:, 0] < -np.inf
  if level <= 0:
    return absolute
  busy = np.flatnonzero(common >= level / 2)
  busy = busy[busy < busy[0] + BEGINNING_S]
  apart = np.abs(np.median(x[:, busy] / common[busy], axis=1) - 1)
  if np.median(apart) > 0.3 or np.mean(x < -level / 10) > 0.01:
    return absolute
  idle = means < level / 4
  begun = np.arange(len(means))[:, None] > busy[0] // STRIDE_S + 12
  again = np.maximum.accumulate(idle & begun) & ~idle
  floor = np.clip(apart.max(), LEAST, FLOOR)
  return busy, level * (floor + 0.07 * again), idle[:, 0]


def distances(points: np.ndarray) -> np.ndarray:
  """Returns each host's distance from the median host, at a cost of O(H).

  It stands for the sum of the distances from all other hosts, at a cost of
  O(H²). The farthest host is the same if one is far from the others; among
  healthy hosts it may be another one.

  Args:
    points: float [H, ..., D].

  Returns:
    [H, ...].
  """
  return np.linalg.norm(points - np.median(points, axis=0), axis=-1)


def _scores(x: np.ndarray, spread: float) -> np.ndarray:
  """Returns z of one metric, [H, S] -> [T, H]."""
  filled, missing = fill_gaps(x[..., None])[..., 0], np.isnan(x)
  first, floor, idle = baseline(filled)
  steps = np.abs(np.diff(filled, axis=1, prepend=filled[:, :1]))
  # Resolution of a metric that hardly changes: a step that two hosts reach.
  smallest = np.where(steps > 0, steps, np.inf).min(axis=1)
  # Where hosts differ by factors, two may have glitches.
  most = np.median(filled) / 8 if floor.any() else np.inf
  resolution = min(np.nan_to_num(np.sort(smallest)[:2][-1], posinf=0.0), most)
  # If all other hosts are constant, the smallest change counts.
  least = max(resolution, 1e-6 * np.median(np.abs(filled)) + 1e-30)
  residual = residuals(filled, first, floor)
  level = _level(residual, first, np.maximum(least, floor), spread)
  still = resolution / MEAN_S + 0.04 * floor.min()
  activity = _activity(steps, first, still, spread)
  # Fractions of repeated and of missing samples that count as one are 0.5 and
  # 0.35. Hosts at a limit, 0 or 100 %, repeat it.
  low, high = np.percentile(filled, (0.1, 99.9))
  within = _means((filled > low) & (filled < high))
  repeated = _change(_means((steps == 0) & ~missing), first[0]) * within
  missing = np.abs(_change(_means(missing), 0)) / 0.35
  return _kept(np.max([level, activity, 2 * repeated, missing], axis=0), idle)


def _kept(score: np.ndarray, idle: np.ndarray) -> np.ndarray:
  """Keeps the last score [T, H] of a busy fleet while it is idle [T].

  It is the smallest score of 90 seconds (18 strides) that end a minute before.
  """
  last = np.maximum.accumulate(np.where(idle, 0, np.arange(idle.size)))
  for now in np.flatnonzero(idle & (last >= 30)):
    before = score[last[now] - 30 : last[now] - 12]
    score[now] = np.maximum(score[now], before.min(axis=0))
  return score.astype(np.float32)


def _level(
  residual: np.ndarray, first: np.ndarray, least: np.ndarray, spread: float
) -> np.ndarray:
  """Scores displaced levels, [H, S] -> [T, H]."""
  size = np.abs(residual)
  noise = max(np.median(size), np.median(size[:, first]))  # Idle or not.
  noise = np.maximum(_ROBUST * noise, least)
  # One sample may be far off: a glitch of a counter.
  residual = residual.clip(-1000 * noise.max(), 1000 * noise.max())
  means = _centered(_means(residual))
  usual = np.array_split(residual[:, first], min(6, first.size), axis=1)
  usual = _centered(np.array([np.median(part, axis=1) for part in usual]))
  outside = np.maximum(means - usual.max(axis=0), usual.min(axis=0) - means)
  size, apart = np.abs(means), spread * _deviation(means)
  return np.clip(2 * outside, size / 8, size) / np.maximum(noise, apart)


def _activity(
  steps: np.ndarray, first: np.ndarray, still: float, spread: float
) -> np.ndarray:
  """Scores metrics that become still or restless, [H, S] -> [T, H].

  The score is the change of the log of the mean step between seconds; a metric
  that freezes scores 3. Steps far below `still` are none, and those far above
  the usual ones count as 20: a glitch of a counter is no activity.
  """
  usual = max(np.median(_means(steps)), np.median(steps[:, first].mean(1)))
  still = max(0.05 * usual, still) + 1e-30
  means = _means(np.minimum(steps, 20 * max(usual, still)))
  change = _change(np.log(means + still), first[0])
  return np.abs(change) / np.maximum(1, spread * _deviation(change))


def _change(means: np.ndarray, begin: int) -> np.ndarray:
  """Subtracts each host's first values, then the median host's, [T, H]."""
  begin = min(begin // STRIDE_S, len(means) - 1)
  first = means[begin : begin + 1 + (BEGINNING_S - MEAN_S) // STRIDE_S]
  return _centered(means - np.median(first, axis=0))


def _centered(means: np.ndarray) -> np.ndarray:
  """Subtracts the median host's value, [T, H] or [S, H]."""
  return means - np.median(means, axis=1, keepdims=True)


def _deviation(x: np.ndarray) -> np.ndarray:
  """Returns the standard deviation of hosts around 0, [T, H] -> [T, 1]."""
  return _ROBUST * np.median(np.abs(x), axis=1, keepdims=True)


def _means(x: np.ndarray) -> np.ndarray:
  """Averages the last minute, every 5 seconds, [H, S] -> [T, H]."""
  span = min(MEAN_S, x.shape[1])
  sums = np.pad(np.cumsum(x, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
  return (sums[:, span:] - sums[:, :-span]).T[::STRIDE_S] / span
