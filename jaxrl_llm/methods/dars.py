"""DARS: hard prompts get more responses in the same step.

A prompt whose n responses have accuracy p gets more responses until its
expected signal, Σ p (1 - p) over the responses, equals that of a prompt with
p = 1/2 ('equal'), or 2 (1 - p) times as much ('hard'):

    S = 2 p (1 - p),   T = n / 2 · {1, 2 (1 - p)},   more = ⌈(T - n S) / S⌉

with p = 0.5 / n for an unsolved prompt, and more = 0 for p >= 1/2. Differs from
a larger group size in that only hard prompts get more responses.

Reference: Yang et al. 2025 (DARS), arXiv:2508.13755.
"""

import dataclasses
import math
from typing import Any

from jax import Array

from jaxrl_llm.data.curriculum import results_of
from jaxrl_llm.data.prompt_source import PromptSource, PromptSourceState
from jaxrl_llm.errors import check_choice
from jaxrl_llm.learner import Algorithm, Settings, estimates, part
from jaxrl_llm.rewards.judge import Judged

# Name -> (p -> factor of the signal, maximum responses as a multiple of n).
_SIGNALS = {"equal": (lambda p: 1.0, 4), "hard": (lambda p: 2 * (1 - p), 8)}


def more_tries(right: int, tries: int, signal: str) -> int:
  """Returns the number of additional responses to a prompt."""
  factor, most = _SIGNALS[signal]
  p = right / tries or 0.5 / tries
  each = 2 * p * (1 - p)
  if p >= 0.5:
    return 0
  missing = tries / 2 * factor(p) - tries * each
  # Rounding errors must not turn an integer into the next one.
  return min((most - 1) * tries, math.ceil(missing / each - 1e-9))


class Dars(PromptSource):
  """Draws hard prompts again in the same step."""

  def __init__(self, *args: Any, signal: str, **settings: Any):
    super().__init__(*args, **settings)
    self._signal = signal

  def again(self, state: PromptSourceState, judged: Judged):
    seen, prompts = results_of(judged.responses), []
    for i, *counts in zip(*(x.tolist() for x in seen)):
      if more := more_tries(*counts, self._signal):
        prompt = self.prompt(i, state.drawn + len(prompts))
        prompts.append(dataclasses.replace(prompt, tries=more))
    return prompts, state.replace(drawn=state.drawn + len(prompts))


def by_example(
  token_rewards: Array, mask: Array, example_id: Array, judged: Array
) -> Array:
  """Rewards minus their mean over all responses to a prompt, [B, T].

  Unlike the mean of a group, it includes all draws of the prompt in a step.
  """
  rewards = estimates.outcome(token_rewards)
  mean = estimates.mean_of_same(rewards, example_id, judged)
  return estimates.per_token(rewards - mean, mask)


def dars(
  algorithm: Algorithm, s: Settings, *, signal: str = "equal"
) -> Algorithm:
  """Draws hard prompts again; all responses to a prompt share a baseline.

  Args:
    algorithm: an algorithm without a critic.
    s: settings of the run.
    signal: Expected signal of a hard prompt: 'equal' to that of a prompt with
      p = 1/2, or 'hard', larger.
  """
  check_choice("signal", signal, _SIGNALS)
  return algorithm.change(
    advantages=part(by_example),
    critic=None,
    prompts=Dars,
    prompt_settings={"signal": signal},
  )
