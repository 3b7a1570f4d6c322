"""Masks of ragged batches."""

import numpy as np


def mask(rng, rows, length):
  """Makes ragged rows with holes; row 1 is empty and row 2 has one token."""
  mask = np.arange(length) < rng.integers(2, length + 1, rows)[:, None]
  mask &= rng.random((rows, length)) < 0.8
  mask[1] = False
  mask[2] = np.arange(length) == 3
  return mask
