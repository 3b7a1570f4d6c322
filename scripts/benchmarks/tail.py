"""Prompts and lengths of responses, for programs with and without jax."""

import numpy as np
from benchmarks.peers import SHAPES

_QUANTILE = 2.3263  # The standard normal distribution at 99 %.


def lengths(options, *, p99: int | None = None, seed: int = 0) -> np.ndarray:
  """Lengths of responses, lognormal, in tokens.

  Args:
    options: prompts N, group_size G, the median of the law before it is cut,
      its 99th percentile p99, and new_tokens, the most of a response.
    p99: instead of the options'.
    seed: of the draw.

  Returns:
    int32 [N, G] in [1, new_tokens].
  """
  size = (options.prompts, options.group_size)
  draw = np.random.default_rng(seed).normal(size=size)
  spread = np.log((p99 or options.p99) / options.median) / _QUANTILE
  drawn = np.round(options.median * np.exp(spread * draw))
  return np.clip(drawn, 1, options.new_tokens).astype(np.int32)


def prompts(count: int, options, *, seed: int = 0) -> list[list[int]]:
  """Returns different prompts of equal length for the options' shape."""
  vocab = SHAPES[options.shape]["vocab_size"]
  size = (count, options.prompt_length)
  return np.random.default_rng(seed).integers(2, vocab, size).tolist()
