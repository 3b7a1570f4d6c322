"""Prompts and response lengths, for programs with and without jax."""

import argparse

import numpy as np
from benchmarks.peers import SHAPES

_QUANTILE = 2.3263  # 99th percentile of the standard normal distribution.


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of a workload."""
  add = parser.add_argument
  add("--shape", default="tiny", choices=SHAPES)
  add("--batch", type=int, default=16, help="responses")
  add("--group_size", type=int, default=4, help="responses per prompt")
  add("--prompt_length", type=int, default=64, help="tokens")
  add("--new_tokens", type=int, default=128, help="tokens per response")
  add("--prompts", type=int, default=64, help="of rollouts")
  add("--median", type=int, default=64, help="tokens per response of rollouts")
  add("--p99", type=int, default=512, help="tokens per response of rollouts")


def lengths(options, *, p99: int | None = None, seed: int = 0) -> np.ndarray:
  """Draws lognormal response lengths in tokens.

  Args:
    options: prompts N, group_size G, median and 99th percentile p99 of the
      distribution before clipping, and new_tokens, the maximum length.
    p99: overrides that of the options.
    seed: random seed.

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
