"""Scores hosts by deviations from the fleet's median and their own baseline."""

import numpy as np

MEAN_S = 60  # Seconds that a deviation is averaged over.
STRIDE_S = 5  # Seconds between scores.
BEGINNING_S = 180  # First seconds, which show how healthy hosts differ.
SPREAD = 2.5  # Standard deviations between hosts that count as one of noise.
MISSING = 0.35  # Missing fraction that counts as one standard deviation.
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

  With r_h(t) the residual of a host and m_h(t) its mean over the last minute,

    z_h(t) = max(min(|m_h|, 2 d_h), |m_h| / 8) / max(σ, SPREAD · σ(t))

  where d is the distance of m from the range of the host's half-minute means in
  the first three minutes: a burst there displaces the norm, and a host that
  returns to its level before the burst is healthy. The scale σ is the noise of
  single seconds over all hosts (1.4826 times the median of |r|), so that a few
  hosts that happen to agree do not make another one look faulty. σ(t) is how
  far the hosts have drifted apart by time t (1.4826 times the median of |m|
  over hosts). A host also gets a score if it becomes still or restless
  (`_activity`) or stops sending.

  Args:
    x: float [H, S, K] of one role, NaN where nothing arrived.

  Returns:
    float32 [T, H, K]: every 5 seconds, from the end of the first minute on.
  """
  # One metric at a time to save memory.
  return np.stack([_scores(x[..., k]) for k in range(x.shape[2])], axis=-1)


def residuals(x: np.ndarray) -> np.ndarray:
  """Returns deviations from the median host beyond the initial ones.

  Healthy hosts differ permanently, by dozens of standard deviations of a
  second's noise. The norm of a host is its median deviation from the fleet in
  the first three minutes. It is subtracted before hosts are compared again:
  otherwise the median would be a single host, whose faults would displace all
  others.

  Args:
    x: float [H, S, ...] without NaN.
  """
  first = x[:, :BEGINNING_S]
  norm = np.median(first - np.median(first, axis=0), axis=1, keepdims=True)
  x = x - norm
  return x - np.median(x, axis=0)


def distances(points: np.ndarray) -> np.ndarray:
  """Returns each host's distance from the median host, at a cost of O(H).

  Args:
    points: float [H, ..., D].

  Returns:
    [H, ...]. The host that is farthest from all others, summed over all pairs,
    is the farthest from the median (tested).
  """
  return np.linalg.norm(points - np.median(points, axis=0), axis=-1)


def _scores(x: np.ndarray) -> np.ndarray:
  """Returns z of one metric, [H, S] -> [T, H]."""
  filled = fill_gaps(x[..., None])[..., 0]
  steps = np.abs(np.diff(filled, axis=1, prepend=filled[:, :1]))
  # Resolution of a metric that hardly changes: a step that two hosts reach.
  smallest = np.where(steps > 0, steps, np.inf).min(axis=1)
  resolution = np.sort(smallest)[min(1, len(smallest) - 1)]
  resolution = resolution if np.isfinite(resolution) else 0.0
  level = _level(residuals(filled), resolution)
  activity = _activity(steps, resolution)
  missing = np.abs(_change(_means(np.isnan(x)))) / MISSING
  return np.maximum(np.maximum(level, activity), missing).astype(np.float32)


def _level(residual: np.ndarray, resolution: float) -> np.ndarray:
  """Scores displaced levels, [H, S] -> [T, H]."""
  size = np.abs(residual)
  # If all other hosts are constant, the smallest change counts.
  noise = max(_ROBUST * np.median(size), resolution, 1e-6 * size.max() + 1e-30)
  means = _centered(_means(residual))
  first = _centered(_means(residual[:, :BEGINNING_S], MEAN_S // 2))
  outside = np.maximum(means - first.max(axis=0), first.min(axis=0) - means)
  size = np.abs(means)
  size = np.maximum(np.minimum(size, 2 * outside), size / 8)
  return size / np.maximum(noise, SPREAD * _deviation(means))


def _activity(steps: np.ndarray, resolution: float) -> np.ndarray:
  """Scores metrics that become still or restless, [H, S] -> [T, H].

  The score is the change of the log of the mean step between seconds; a metric
  that freezes scores 3.
  """
  means = _means(steps)
  least = 0.05 * np.median(means) + resolution / MEAN_S + 1e-30
  change = _change(np.log(means + least))
  return np.abs(change) / np.maximum(1, SPREAD * _deviation(change))


def _change(means: np.ndarray) -> np.ndarray:
  """Subtracts each host's usual value, then the median host's, [T, H]."""
  first = 1 + (BEGINNING_S - MEAN_S) // STRIDE_S
  return _centered(means - np.median(means[:first], axis=0))


def _centered(means: np.ndarray) -> np.ndarray:
  """Subtracts the median host's value, [T, H]."""
  return means - np.median(means, axis=1, keepdims=True)


def _deviation(x: np.ndarray) -> np.ndarray:
  """Returns the standard deviation of hosts around 0, [T, H] -> [T, 1]."""
  return _ROBUST * np.median(np.abs(x), axis=1, keepdims=True)


def _means(x: np.ndarray, span: int = MEAN_S) -> np.ndarray:
  """Averages the last `span` seconds, every 5 seconds, [H, S] -> [T, H]."""
  span = min(span, x.shape[1])
  sums = np.pad(np.cumsum(x, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
  return (sums[:, span:] - sums[:, :-span]).T[::STRIDE_S] / span
