"""Prompts and lengths of responses, for programs with and without jax."""

import numpy as np
from benchmarks.peers import SHAPES

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


def lengths(options, *, p99: int | None = None, seed: int = 0) -> np.ndarray:
  """Returns `long_tail` of the options, or of another 99th percentile."""
  return long_tail(
    options.prompts,
    options.group_size,
    median=options.median,
    p99=p99 or options.p99,
    longest=options.new_tokens,
    seed=seed,
  )


def prompts(count: int, options, *, seed: int = 0) -> list[list[int]]:
  """Returns different prompts of equal length for the options' shape."""
  vocab = SHAPES[options.shape].fields["vocab_size"]
  size = (count, options.prompt_length)
  return np.random.default_rng(seed).integers(2, vocab, size).tolist()
