"""GDRO of rollouts: allocates more responses where rewards vary most.

    n_b = n √v_b / Σ q_b √v_b

v_b is the reward variance of prompts whose solve rate is in bin b, q_b their
fraction of the batch and n is data.group_size: among all allocations of a
budget, this one minimises the variance of the mean reward. Differs from DARS in
that the batch size is fixed. The authors find n_b with a shadow price, which
converges to the same; their other game, over prompts, is not implemented.

Reference: Panaganti et al. 2026 (GDRO), arXiv:2601.19280.
"""

import dataclasses
from typing import Any

import chex
import numpy as np

from jaxrl_llm.data.curriculum import Curriculum, results_of
from jaxrl_llm.learner import Algorithm, Settings
from jaxrl_llm.types import Responses

_BINS = 10
_FEWEST = 2  # Responses to a prompt: a single one has no group baseline.


@chex.dataclass(frozen=True)
class Variances:
  """Solve rates of P prompts, and reward variances by bin of the rate."""

  drawn: int
  rate: np.ndarray  # float32 [P], fraction of correct responses; 1/2 at first.
  variance: np.ndarray  # float32 [10], of the rewards within a prompt.


def bins_of(rate: np.ndarray) -> np.ndarray:
  """Returns the bin of each rate, int, shape of `rate`."""
  return np.minimum((rate * _BINS).astype(int), _BINS - 1)


def apportion(
  weights: np.ndarray, total: int, *, fewest: int, most: int
) -> np.ndarray:
  """Splits a total into integers, as proportional to weights as bounds allow.

  Args:
    weights: [n], at least one of them positive.
    total: from n · fewest to n · most.
    fewest: lower bound of each integer.
    most: upper bound of each integer.

  Returns:
    int [n], with sum `total`.
  """
  wanted = total * weights / weights.sum()
  given = np.full(len(weights), fewest)
  for _ in range(total - given.sum()):
    given[np.argmax(np.where(given < most, wanted - given, -np.inf))] += 1
  return given


class Gdro(Curriculum):
  """Draws prompts uniformly, and allocates responses to each."""

  def __init__(self, *args: Any, group_size: int, **settings: Any):
    super().__init__(*args, explore=1.0, **settings)
    self._tries = group_size

  def init(self) -> Variances:
    rate = np.full(len(self), 0.5, np.float32)
    # 1/4, the variance at a rate of 1/2, is the largest.
    return Variances(
      drawn=0, rate=rate, variance=np.full(_BINS, 0.25, np.float32)
    )

  def scores(self, state: Variances, rng: np.random.Generator) -> np.ndarray:
    return np.zeros(len(state.rate))  # All prompts are equally likely.

  def draw(self, state: Variances, n: int):
    prompts, after = super().draw(state, n)
    if not prompts:
      return prompts, after
    rate = state.rate[[prompt.example_id for prompt in prompts]]
    deviations = np.sqrt(state.variance[bins_of(rate)]) + 1e-6
    bounds = {"fewest": min(_FEWEST, self._tries), "most": 4 * self._tries}
    tries = apportion(deviations, n * self._tries, **bounds).tolist()
    return [
      dataclasses.replace(prompt, tries=count)
      for prompt, count in zip(prompts, tries)
    ], after

  def observe(self, state: Variances, responses: Responses) -> Variances:
    seen, rate = results_of(responses), state.rate.copy()
    several, variance = seen.tries > 1, state.variance.copy()
    tries, solved = seen.tries[several], seen.rate[several]
    # Unbiased: otherwise few responses to a bin would lead to even fewer.
    within = solved * (1 - solved) * tries / (tries - 1)
    place = bins_of(rate[seen.prompts[several]])
    for one in np.unique(place):
      variance[one] += 0.5 * (np.mean(within[place == one]) - variance[one])
    rate[seen.prompts] += 0.5 * (seen.rate - rate[seen.prompts])
    return state.replace(rate=rate, variance=variance)


def gdro(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Allocates more responses to prompts whose rewards vary most."""
  return algorithm.change(prompts=Gdro)
