"""Outlier scores of hosts: distances to the fleet's median."""

import numpy as np

MEAN_S = 60  # Seconds that a deviation is averaged over.
STRIDE_S = 5  # Seconds between two looks.
BEGINNING_S = 120  # Seconds that show how hosts differ when all is well.
# For `median_scores`; chosen on simulated fleets, see docs/reliability.md.
THRESHOLD = 1.7
_ROBUST = 1.4826  # Standard deviation / MAD of a normal distribution.


def fill_gaps(x: np.ndarray) -> np.ndarray:
  """Replaces each missing sample by the one of its host nearest in time.

  Args:
    x: float [H, S, K], NaN where nothing arrived. Of two equally near samples
      the earlier one counts. A host that never sent a metric gets the fleet's
      median of every second; 0 where no host sent it.

  Returns:
    float32 [H, S, K] without NaN.
  """
  filled = np.array(x, np.float32)
  for k in range(x.shape[2]):  # One after the other: less memory at a time.
    if np.isnan(filled[..., k]).any():
      filled[..., k] = _filled(filled[..., k])
  return filled


def _filled(x: np.ndarray) -> np.ndarray:
  """One metric, [H, S], without NaN."""
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
  """Deviation from the fleet's median, in robust standard deviations.

    r_h(t) = x_h(t) − median_g x_g(t),  m_h(t) its mean over the last minute
    z_h(t) = max(min(|m_h|, 2 |m_h − b_h|), |m_h| / 2) / (1.4826 · median |r|)

  with b_h the median of m_h in the first two minutes. Healthy hosts may differ
  from each other for good, so a difference that was there from the beginning
  counts half. The scale is over all hosts and seconds of a metric: few hosts
  that happen to agree do not make a fourth one look broken.

  Args:
    x: float [H, S, K] of one role, without NaN.

  Returns:
    float32 [T, H, K]: every 5 seconds, from the end of the first minute on.
  """
  # One metric after the other: less memory at a time.
  return np.stack([_deviations(x[..., k]) for k in range(x.shape[2])], axis=-1)


def distances(points: np.ndarray) -> np.ndarray:
  """Distance of each host to all others at a cost of O(H): to their median.

  Args:
    points: float [H, ..., D].

  Returns:
    [H, ...]. The host that is farthest from all others, summed over all pairs,
    is the farthest from the median (tested).
  """
  return np.linalg.norm(points - np.median(points, axis=0), axis=-1)


def joint(scores: np.ndarray) -> np.ndarray:
  """All metrics as one: [T, H, K] -> [T, H, 1], the root mean square."""
  return np.sqrt(np.mean(scores**2, axis=-1, keepdims=True))


def _deviations(x: np.ndarray) -> np.ndarray:
  """z of one metric, [H, S] -> [T, H]."""
  residual = x - np.median(x, axis=0)
  size = np.abs(residual)
  # If a metric is constant on most hosts, the smallest change counts.
  scale = max(_ROBUST * np.median(size), 1e-6 * (1 + size.max()))
  sums = np.cumsum(residual, axis=1, dtype=np.float64)
  sums = np.pad(sums, ((0, 0), (1, 0)))
  span = min(MEAN_S, x.shape[1])
  means = (sums[:, span:] - sums[:, :-span])[:, ::STRIDE_S] / span
  first = means[:, : 1 + (BEGINNING_S - span) // STRIDE_S]
  new = np.abs(means - np.median(first, axis=1, keepdims=True))
  size = np.abs(means)
  scores = np.maximum(np.minimum(size, 2 * new), size / 2)
  return (scores.T / scale).astype(np.float32)
