"""Ragged batches."""

import numpy as np


def mask(rng, rows, length):
  """Makes ragged rows with holes; row 1 is empty and row 2 has one token."""
  mask = np.arange(length) < rng.integers(2, length + 1, rows)[:, None]
  mask &= rng.random((rows, length)) < 0.8
  mask[1] = False
  mask[2] = np.arange(length) == 3
  return mask


def batch(seed, *spreads, rows=6, length=12):
  """Makes log-probs of several policies, a normal array and a mask.

  Args:
    seed: seed of the arrays.
    *spreads: standard deviation of each policy around the one before.
    rows: number of rows.
    length: number of tokens.

  Returns:
    Log-probs of the last policy first, then the normal array, float32 with NaN
    where masked, and the mask.
  """
  rng = np.random.default_rng(seed)
  chosen = mask(rng, rows, length)
  arrays = [-rng.exponential(size=chosen.shape)]
  for spread in spreads:
    arrays.insert(0, arrays[0] + spread * rng.normal(size=chosen.shape))
  arrays.append(rng.normal(size=chosen.shape))
  return *(
    np.where(chosen, x, np.nan).astype(np.float32) for x in arrays
  ), chosen
