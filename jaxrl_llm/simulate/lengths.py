"""Lengths of responses: from a distribution with a tail, or from a trace."""

from typing import NamedTuple

import chex
import numpy as np

_Z99 = 2.3263478740408408  # 99th percentile of the standard normal.


class Requests(NamedTuple):
  """What is asked of the sampler: N prompts with G responses each."""

  prompt_lengths: np.ndarray  # int [N], tokens, at least 1.
  lengths: np.ndarray  # int [N, G], tokens each response will have.


def lognormal(
  prompts: int,
  group_size: int,
  *,
  median: float,
  p99: float,
  maximum: int,
  prompt_length: int,
  between: float,
  seed: int,
) -> Requests:
  """Lognormal lengths, capped where a response must end.

    log length = log median + σ (√b · z_prompt + √(1 − b) · z_response)

  Args:
    prompts: N.
    group_size: G.
    median: of the lengths, tokens.
    p99: their 99th percentile without the cap, at least the median.
    maximum: cap; responses of this length are overlong.
    prompt_length: of every prompt.
    between: b, share of the variance of log length that prompts explain.
    seed: of the draw.
  """
  counts = (prompts, group_size, maximum, prompt_length)
  if not (1 <= median <= p99 and 0 <= between <= 1 and min(counts) >= 1):
    raise ValueError(
      "1 <= median <= p99, between in 0..1 and prompts, group_size, maximum and"
      f" prompt_length >= 1 are needed, got {median}, {p99}, {between} and"
      f" {', '.join(map(str, counts))}"
    )
  random = np.random.default_rng(seed)
  of_prompt = random.standard_normal((prompts, 1))
  of_response = random.standard_normal((prompts, group_size))
  z = np.sqrt(between) * of_prompt + np.sqrt(1 - between) * of_response
  drawn = median * np.exp(np.log(p99 / median) / _Z99 * z)
  lengths = np.clip(np.round(drawn), 1, maximum).astype(np.int64)
  return Requests(np.full(prompts, prompt_length, np.int64), lengths)


def resample(
  trace: chex.Array,
  prompts: int,
  group_size: int,
  *,
  prompt_length: int,
  seed: int,
) -> Requests:
  """Lengths drawn from those of a real run, with replacement.

  Args:
    trace: int [n], lengths of a run's responses (`Rollout.lengths`).
    prompts: N.
    group_size: G.
    prompt_length: of every prompt.
    seed: of the draw.
  """
  trace = np.asarray(trace)
  if trace.ndim != 1 or not trace.size or trace.min() < 1:
    raise ValueError(
      "trace must be a list of lengths >= 1, got shape"
      f" {trace.shape} from {trace.min(initial=0)}"
    )
  random = np.random.default_rng(seed)
  lengths = random.choice(trace, (prompts, group_size)).astype(np.int64)
  return Requests(np.full(prompts, prompt_length, np.int64), lengths)
