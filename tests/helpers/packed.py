"""Rows of one sample each, as the trainer's models read them."""

import numpy as np

from jaxrl_llm import models


def rows(tokens, mask=None, **fields) -> models.PackedRows:
  """Tokens [B, T] that predict the next one of their row.

  Args:
    tokens: of one sample a row, without padding.
    mask: of what counts; by default all.
    **fields: others, or others than by default.
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
