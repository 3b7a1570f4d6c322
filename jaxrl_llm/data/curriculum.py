"""Curricula: what earlier responses showed decides which prompts are drawn."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.types import Responses

# Prompts in a pool at most; a curriculum has arrays of that size.
LARGEST = 10_000_000


class Results(NamedTuple):
  """Results of n different prompts."""

  prompts: np.ndarray  # int [n], rows of the data, ascending.
  right: np.ndarray  # int [n], correct responses.
  tries: np.ndarray  # int [n], judged responses; at least 1.

  @property
  def rate(self) -> np.ndarray:
    """Fraction of correct responses, [n]."""
    return self.right / self.tries


def results_of(responses: Responses) -> Results:
  """Counts the judged responses to each prompt that have ended."""
  counted = responses.judged & responses.ended
  asked = responses.rollout.example_id[counted]
  prompts, place = np.unique(asked, return_inverse=True)
  right = np.bincount(place, responses.correct[counted], len(prompts))
  return Results(prompts, right.astype(int), np.bincount(place))


def check_pool(source: PromptSource) -> None:
  """Refuses data without an end, by an InputError."""
  if len(source) > LARGEST:
    raise InputError(
      f"a record is kept of every prompt, at most {LARGEST:,}; set"
      " config.data.pool to their number"
    )


class Curriculum(PromptSource):
  """Draws the prompts of a pool that have the highest scores.

  A subclass defines `init`, `scores` and `observe`. Its state is a frozen chex
  dataclass of arrays with `drawn`, the number of prompts so far. The draw of a
  state depends only on the state and the seed.
  """

  def __init__(
    self, *args: Any, seed: int, explore: float = 0.1, **settings: Any
  ):
    """Checks the pool.

    Args:
      *args: arguments of `PromptSource`.
      seed: seed of the draws.
      explore: expected fraction of prompts that are drawn uniformly.
      **settings: arguments of `PromptSource`.

    Raises:
      InputError: The data have no end.
    """
    super().__init__(*args, seed=seed, **settings)
    check_number("explore", explore, "[0, 1]")
    check_pool(self)
    self._seed, self._explore = seed, explore

  def scores(self, state: Any, rng: np.random.Generator) -> np.ndarray:
    """Returns a score of each prompt, [P]."""
    raise NotImplementedError

  def draw(self, state: Any, n: int) -> tuple[list[Prompt], Any]:
    """Draws n prompts; more than the pool has are drawn again in turn.

    Raises:
      InputError: A prompt is too long, or all are with on_long='drop'.
    """
    rng = np.random.default_rng((self._seed, state.drawn))
    order = np.argsort(-self.scores(state, rng), kind="stable")
    best = n - rng.binomial(n, self._explore)
    order = [*order[:best], *rng.permutation(order[best:])]
    prompts = []
    for turn in itertools.count():
      for i in order:
        if len(prompts) == n:
          return prompts, state.replace(drawn=state.drawn + n)
        prompt = self.prompt(int(i), state.drawn + len(prompts))
        prompts += [] if prompt is None else [prompt]
      if turn == 0 and n and not prompts:
        raise InputError(
          "all prompts are longer than data.max_prompt_length; raise it"
        )
