"""Curricula: earlier results determine which prompts are drawn."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.types import Responses

# Maximum size of a pool; a curriculum has arrays of that size.
LARGEST = 10_000_000


class Results(NamedTuple):
  """Results of n distinct prompts."""

  prompts: np.ndarray  # int [n], rows of the data, ascending.
  right: np.ndarray  # int [n], number of correct responses.
  tries: np.ndarray  # int [n], number of judged responses; at least 1.

  @property
  def rate(self) -> np.ndarray:
    """Fraction of correct responses, [n]."""
    return self.right / self.tries


def results_of(responses: Responses) -> Results:
  """Counts the ended, judged responses to each prompt, and the correct ones."""
  counted = responses.judged & responses.ended
  asked = responses.rollout.example_id[counted]
  prompts, place = np.unique(asked, return_inverse=True)
  right = np.bincount(place, responses.correct[counted], len(prompts))
  return Results(prompts, right.astype(int), np.bincount(place))


def check_pool(source: PromptSource) -> None:
  """Raises an InputError if the data are endless or too large for a pool."""
  if len(source) > LARGEST:
    raise InputError(
      f"this method keeps a record of each prompt, for at most {LARGEST:,}"
      " prompts; set config.data.pool to the number of prompts to train on"
    )


class Curriculum(PromptSource):
  """Draws the prompts of a pool that have the highest scores.

  A subclass defines `init`, `scores` and `observe`. Its state is a frozen chex
  dataclass of arrays with a field `drawn`, the number of prompts drawn so far.
  A draw depends only on the state and the seed.
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
      InputError: The data are endless or too large.
      ValueError: `explore` is out of range.
    """
    super().__init__(*args, seed=seed, **settings)
    check_number("explore", explore, "[0, 1]")
    check_pool(self)
    self._seed, self._explore = seed, explore

  def scores(self, state: Any, rng: np.random.Generator) -> np.ndarray:
    """Returns the score of each prompt, [P]."""
    raise NotImplementedError

  def draw(self, state: Any, n: int) -> tuple[list[Prompt], Any]:
    """Draws n prompts; cycles through the pool if n exceeds its size.

    Raises:
      InputError: A prompt is too long; with on_long='drop', all prompts are.
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
