"""Packed rows of one sample each, the input of the trainer's models."""

import numpy as np

from jaxrl_llm import models


def rows(tokens, mask=None, **fields) -> models.PackedRows:
  """Packs tokens [B, T], each of which predicts the next one of its row.

  Args:
    tokens: one sample per row, without padding.
    mask: tokens that count; by default all.
    **fields: further fields, or replacements of the defaults.
  """
  tokens = np.asarray(tokens, np.int32)
  place = np.broadcast_to(
    np.arange(tokens.shape[1], dtype=np.int32), tokens.shape
  )
  return models.PackedRows(
    **{
      "tokens": tokens,
      "segments": np.ones_like(tokens),
      "positions": place,
      "targets": np.roll(tokens, -1, axis=1),
      "mask": np.ones(tokens.shape, bool) if mask is None else mask,
    }
    | fields
  )
