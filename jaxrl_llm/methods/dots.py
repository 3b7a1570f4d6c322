"""DOTS: prefers prompts that the policy solves about half of the time.

    p_i ∝ exp(-|r_i - 1/2| / τ),   r_i += 1/2 (correct / tries - r_i)

Differs from uniform sampling in that prompts which are always or never solved,
whose groups have no gradient, are rarely drawn. For prompts that were not drawn
recently, the authors predict the solve rate r with an attention over
embeddings; here it is the running estimate of earlier draws, initially 1/2.
Their τ of 1e-3 nearly always picks the closest rates; the default here is 0.1.

Reference: Sun et al. 2025 (DOTS), arXiv:2506.05316.
"""

from typing import Any

import chex
import numpy as np

from jaxrl_llm.data.curriculum import Curriculum, results_of
from jaxrl_llm.errors import check_number
from jaxrl_llm.learner import Algorithm, Settings
from jaxrl_llm.types import Responses


@chex.dataclass(frozen=True)
class Rates:
  """Solve rates of P prompts."""

  drawn: int
  rate: np.ndarray  # float32 [P].


class TargetRate(Curriculum):
  """Draws prompts by the distance of their solve rate from a target."""

  def __init__(self, *args: Any, target: float, tau: float, **settings: Any):
    super().__init__(*args, **settings)
    self._target, self._tau = target, tau

  def init(self) -> Rates:
    return Rates(drawn=0, rate=np.full(len(self), 0.5, np.float32))

  def scores(self, state: Rates, rng: np.random.Generator) -> np.ndarray:
    # The n largest of log p + Gumbel noise are n draws without replacement.
    far = np.abs(state.rate - self._target)
    return rng.gumbel(size=far.size) - far / self._tau

  def observe(self, state: Rates, responses: Responses) -> Rates:
    seen, rate = results_of(responses), state.rate.copy()
    rate[seen.prompts] += 0.5 * (seen.rate - rate[seen.prompts])
    return state.replace(rate=rate)


def dots(
  algorithm: Algorithm,
  s: Settings,
  *,
  target: float = 0.5,
  tau: float = 0.1,
  explore: float = 0.1,
) -> Algorithm:
  """Prefers prompts with solve rates near a target.

  Args:
    algorithm: any algorithm.
    s: settings of the run.
    target: Solve rate that is preferred.
    tau: Temperature of the preference, in units of the solve rate.
    explore: Expected fraction of prompts that are drawn uniformly.
  """
  check_number("tau", tau, "(0, inf)")
  check_number("explore", explore, "[0, 1]")
  settings = {"target": target, "tau": tau, "explore": explore}
  return algorithm.change(prompts=TargetRate, prompt_settings=settings)
