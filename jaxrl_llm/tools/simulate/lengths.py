"""Response lengths from a heavy-tailed distribution, or from a trace."""

import dataclasses
from collections.abc import Sequence

import chex
import numpy as np

_Z99 = 2.3263478740408408  # 99th percentile of the standard normal.


@dataclasses.dataclass(frozen=True)
class Requests:
  """Requests to the sampler: N prompts with G responses each.

  Raises:
    ValueError: A length is below 1, or the shapes do not match.
  """

  prompt_lengths: np.ndarray  # int [N], tokens, at least 1.
  lengths: np.ndarray  # int [N, G], tokens each response will have.

  def __post_init__(self):
    prompts, lengths = self.prompt_lengths, self.lengths
    if lengths.ndim != 2 or prompts.shape != lengths.shape[:1]:
      shapes = f"{lengths.shape} and {prompts.shape}"
      raise ValueError(f"lengths are [N, G], prompt_lengths [N]; got {shapes}")
    if not lengths.size or min(lengths.min(), prompts.min()) < 1:
      raise ValueError("lengths must be at least 1 and must not be empty")

  def sample_ids(self, prompts: Sequence[int]) -> np.ndarray:
    """Returns the sample ids of the responses to prompts, [n, G]."""
    group_size = self.lengths.shape[1]
    return np.asarray(prompts)[:, None] * group_size + np.arange(group_size)


def lognormal(
  prompts: int,
  group_size: int,
  *,
  median: float,
  p99: float,
  maximum: int,
  between: float,
  seed: int,
) -> np.ndarray:
  """Draws lognormal lengths, capped at `maximum`; int [N, G].

    log length = log median + σ (√b · z_prompt + √(1 − b) · z_response)

  Args:
    prompts: N.
    group_size: G.
    median: median of the lengths, tokens.
    p99: 99th percentile of the lengths before the cap, at least the median.
    maximum: cap; responses of this length are overlong.
    between: b, fraction of the variance of log length between prompts.
    seed: random seed.
  """
  random = np.random.default_rng(seed)
  of_prompt = random.standard_normal((prompts, 1))
  of_response = random.standard_normal((prompts, group_size))
  z = np.sqrt(between) * of_prompt + np.sqrt(1 - between) * of_response
  drawn = median * np.exp(np.log(p99 / median) / _Z99 * z)
  return np.clip(np.round(drawn), 1, maximum).astype(np.int64)


def resample(
  trace: chex.Array, prompts: int, group_size: int, *, seed: int
) -> np.ndarray:
  """Draws lengths from a real run's, with replacement; int [N, G].

  Args:
    trace: int [n], lengths of a run's responses (`Rollout.lengths`).
    prompts: N.
    group_size: G.
    seed: random seed.
  """
  trace = np.asarray(trace)
  if trace.ndim != 1 or not trace.size or trace.min() < 1:
    raise ValueError(
      "trace must be a list of lengths >= 1, got shape"
      f" {trace.shape} from {trace.min(initial=0)}"
    )
  random = np.random.default_rng(seed)
  return random.choice(trace, (prompts, group_size)).astype(np.int64)
