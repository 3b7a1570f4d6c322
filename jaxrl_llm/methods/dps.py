"""DPS: a hidden Markov model predicts which groups will be mixed.

None, some or all of the responses in a prompt's group are correct. The belief
over these three states follows transition probabilities that all prompts share
and that are estimated from running counts:

    prior b' = T b;   seen: b = one-hot, counts = 0.7 counts + 0.3 + Σ joint

Differs from dynamic sampling in that most groups without a gradient are never
sampled, instead of being sampled and discarded.

Reference: Dynamics-predictive sampling 2026 (DPS), arXiv:2603.10887.
"""

import chex
import numpy as np

from jaxrl_llm.data.curriculum import Curriculum, results_of
from jaxrl_llm.errors import check_number
from jaxrl_llm.learner import Algorithm, Settings
from jaxrl_llm.types import Responses

_MIXED = 1  # The outcomes of a group are none, some (mixed) and all.


@chex.dataclass(frozen=True)
class Belief:
  """Beliefs about P prompts."""

  drawn: int
  belief: np.ndarray  # float32 [P, 3]: none, some or all of a group correct.
  counts: np.ndarray  # float32 [3, 3], transitions to <- from.


def transition(
  belief: np.ndarray,
  counts: np.ndarray,
  prompts: np.ndarray,
  outcomes: np.ndarray,
):
  """Updates belief and counts after a step with observed groups.

  Args:
    belief: [P, 3], before the step.
    counts: [3, 3], before the step.
    prompts: int [n], observed prompts.
    outcomes: int [n], 0 to 2: observed outcomes of their groups.
  """
  matrix = counts / counts.sum(0)
  after, now = belief @ matrix.T, np.eye(3)[outcomes]
  joint = now[:, :, None] * belief[prompts][:, None] * matrix
  joint /= joint.sum((1, 2), keepdims=True)
  after[prompts] = now
  return after, 0.7 * counts + 0.3 + joint.sum(0)


class Dps(Curriculum):
  """Draws the prompts whose groups are most likely to be mixed."""

  def init(self) -> Belief:
    belief = np.full((len(self), 3), 1 / 3, np.float32)
    return Belief(drawn=0, belief=belief, counts=np.ones((3, 3), np.float32))

  def scores(self, state: Belief, rng: np.random.Generator) -> np.ndarray:
    prior = state.belief @ (state.counts / state.counts.sum(0)).T
    return prior[:, _MIXED] + 1e-6 * rng.random(len(prior))

  def observe(self, state: Belief, responses: Responses) -> Belief:
    seen = results_of(responses)
    if not seen.prompts.size:
      return state
    outcomes = (seen.right > 0).astype(int) + (seen.right == seen.tries)
    belief, counts = transition(
      state.belief, state.counts, seen.prompts, outcomes
    )
    return state.replace(
      belief=belief.astype(np.float32), counts=counts.astype(np.float32)
    )


def dps(
  algorithm: Algorithm, s: Settings, *, explore: float = 0.1
) -> Algorithm:
  """Draws the prompts whose groups are most likely to be mixed.

  Args:
    algorithm: any algorithm.
    s: settings of the run.
    explore: Expected fraction of prompts that are drawn uniformly.
  """
  check_number("explore", explore, "[0, 1]")
  return algorithm.change(prompts=Dps, prompt_settings={"explore": explore})
