"""ADHint: hard prompts are repeated with the beginning of a solution.

A prompt whose responses have accuracy p < 3/4 gets a second group whose
responses begin with the first w L of the L tokens of its solution,

    w = (most - least) (1 - p) + least

Positive advantages of responses without a hint, and negative ones of responses
with a hint, are multiplied by 1 + max(0, p_hinted - p_plain). Differs from GRPO
in that a prompt that is never solved still has a gradient, on the tokens after
the hint. The hint itself is not trained on: the authors' loss on it is not
implemented.

Reference: Zhang et al. 2025 (ADHint), arXiv:2512.13095. The bounds of w and the
factor are choices of this library.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.curriculum import results_of
from jaxrl_llm.data.prompt_source import PromptSource, PromptSourceState
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Algorithm, Settings, part, then
from jaxrl_llm.rewards.judge import Judged
from jaxrl_llm.types import Origin


class Hints(PromptSource):
  """Draws hard prompts again, with the beginning of their solutions."""

  def __init__(
    self,
    *args: Any,
    max_response_length: int,
    most: float,
    least: float,
    enough: float,
    **settings: Any,
  ):
    super().__init__(*args, **settings)
    self._room = max_response_length - 1
    self._most, self._least, self._enough = most, least, enough

  def share(self, p: float) -> float:
    """Returns the fraction of the solution given at an accuracy of p."""
    return (self._most - self._least) * (1 - p) + self._least

  def again(self, state: PromptSourceState, judged: Judged):
    seen, prompts = results_of(judged.responses), []
    for i, p in zip(seen.prompts.tolist(), seen.rate.tolist()):
      if p >= self._enough:
        continue
      prompt = self.prompt(i, state.drawn + len(prompts))
      if not isinstance(prompt.completion, str):
        raise InputError(
          f"{prompt.id}: it has no solution to hint at; name its column by"
          " data.columns={'completion': NAME}"
        )
      solution = self._tokenizer.continued(prompt.completion)
      length = min(int(self.share(p) * len(solution)), self._room)
      opening = tuple(solution[:length])
      prompts.append(dataclasses.replace(prompt, opening=opening))
    return prompts, state.replace(drawn=state.drawn + len(prompts))


def hinted(
  advantages: Array, origin: Array, correct: Array, judged: Array
) -> Array:
  """Group advantages, scaled by the accuracy gain of hints, [B, T]."""
  given = origin[:, 0] == int(Origin.FOREIGN)

  def accuracy(rows: Array):
    rows = rows & judged
    return jnp.sum(correct & rows) / jnp.maximum(jnp.sum(rows), 1)

  factor = 1 + jnp.maximum(accuracy(given) - accuracy(~given), 0)
  scaled = jnp.where(given[:, None], advantages < 0, advantages > 0)
  return jnp.where(scaled, advantages * factor, advantages)


def adhint(
  algorithm: Algorithm,
  s: Settings,
  *,
  most: float = 0.8,
  least: float = 0.0,
  enough: float = 0.75,
) -> Algorithm:
  """Draws hard prompts again with hints, and scales advantages by their gain.

  Args:
    algorithm: an algorithm with group baselines.
    s: settings of the run.
    most: Fraction of a solution given at an accuracy of 0.
    least: Fraction of a solution given at an accuracy of 1.
    enough: Accuracy from which a prompt gets no hint.
  """
  return algorithm.change(
    advantages=then(algorithm.advantages, part(hinted)),
    prompts=Hints,
    prompt_settings={"most": most, "least": least, "enough": enough},
  )
