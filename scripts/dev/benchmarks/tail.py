"""Responses with a long tail of lengths, for programs with and without jax."""

import numpy as np

_QUANTILE = 2.3263  # Of the standard normal law, at 99 %.


def long_tail(
  prompts: int,
  group_size: int,
  *,
  median: int,
  p99: int,
  longest: int,
  seed: int = 0,
) -> np.ndarray:
  """Lengths of responses, lognormal, in tokens.

  Args:
    prompts: N.
    group_size: responses of a prompt, G.
    median: of the law before it is cut.
    p99: its 99th percentile.
    longest: most tokens of a response.
    seed: of the draw.

  Returns:
    int32 [N, G] in [1, longest].
  """
  draw = np.random.default_rng(seed).normal(size=(prompts, group_size))
  spread = np.log(p99 / median) / _QUANTILE
  lengths = np.round(median * np.exp(spread * draw))
  return np.clip(lengths, 1, longest).astype(np.int32)
