"""DPS: a hidden Markov model predicts whose group will be mixed.

A prompt is solved by none, some or all of its group. The belief in these three
moves by transitions that all prompts share and that are counted as they go:

    prior b' = T b;   seen: b = one-hot, counts = 0.7 counts + 0.3 + Σ joint

Differs from dynamic sampling in that groups without a gradient are mostly not
sampled, instead of sampled and discarded.

Reference: Dynamics-predictive sampling 2026 (DPS), arXiv:2603.10887.
"""

import chex
import numpy as np

from jaxrl_llm import register
from jaxrl_llm.data.curriculum import Curriculum, results_of

_MIXED = 1  # The outcomes of a group are none, mixed and all.


@chex.dataclass(frozen=True)
class Belief:
  """Beliefs about P prompts."""

  drawn: int
  belief: np.ndarray  # float32 [P, 3]: solved by none, some or all of a group.
  counts: np.ndarray  # float32 [3, 3], transitions to <- from.


def transition(belief, counts, prompts, outcomes):
  """Moves belief and counts by a step in which some prompts were seen.

  Args:
    belief: [P, 3], before the step.
    counts: [3, 3].
    prompts: int [n], those seen.
    outcomes: int [n], 0 to 2: what they turned out to be.
  """
  matrix = counts / counts.sum(0)
  after, now = belief @ matrix.T, np.eye(3)[outcomes]
  joint = now[:, :, None] * belief[prompts][:, None] * matrix
  joint /= joint.sum((1, 2), keepdims=True)
  after[prompts] = now
  return after, 0.7 * counts + 0.3 + joint.sum(0)


class Dps(Curriculum):
  """Draws the prompts that are most likely to be solved by some."""

  def init(self) -> Belief:
    belief = np.full((len(self), 3), 1 / 3, np.float32)
    return Belief(drawn=0, belief=belief, counts=np.ones((3, 3), np.float32))

  def scores(self, state: Belief, rng: np.random.Generator) -> np.ndarray:
    prior = state.belief @ (state.counts / state.counts.sum(0)).T
    return prior[:, _MIXED] + 1e-6 * rng.random(len(prior))

  def observe(self, state: Belief, responses) -> Belief:
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


register.prompt_source("dps", Dps)
