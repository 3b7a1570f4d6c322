"""NudgeRL: samples groups of a prompt in several contexts.

Each prompt is drawn once in each of K contexts, short texts before the
question.

    A = R - mean_context R + w (mean_context R - mean_prompt R)

Differs from GRPO in that responses vary due to contexts and not only due to the
temperature. The authors also distil responses found with a context into the
bare prompt, which is not implemented: give '' as a context to train on it too.

Reference: Lee et al. 2026 (NudgeRL), arXiv:2605.15726.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import Array

from jaxrl_llm.data.prompt_source import PromptSource, PromptSourceState
from jaxrl_llm.data.tasks import Example
from jaxrl_llm.learner import Algorithm, Settings, estimates, part


class Contexts(PromptSource):
  """Draws every prompt once in each context."""

  def __init__(self, *args: Any, contexts: Sequence[str], **settings: Any):
    super().__init__(*args, **settings)
    self._contexts = tuple(contexts)

  def draw(self, state: PromptSourceState, n: int):
    count = len(self._contexts)
    asked, after = super().draw(state, -(-n // count))
    ids = [prompt.example_id for prompt in asked for _ in range(count)][:n]
    prompts = [self.prompt(i, state.drawn + k) for k, i in enumerate(ids)]
    return prompts, after.replace(drawn=state.drawn + n)

  def prompt(self, example_id: int, group_id: int):
    # A question that is too long in one context is dropped in all of them.
    count = len(self._contexts)
    every = [self._tokens(self.example(example_id, i)) for i in range(count)]
    return None if None in every else super().prompt(example_id, group_id)

  def example(self, example_id: int, group_id: int) -> Example:
    example = super().example(example_id, group_id)
    context = self._contexts[group_id % len(self._contexts)]
    if example.messages:
      *before, last = example.messages
      last = {**last, "content": context + last["content"]}
      return dataclasses.replace(example, messages=[*before, last])
    return dataclasses.replace(example, question=context + example.question)


def inter_intra(
  token_rewards: Array,
  mask: Array,
  groups: Array,
  example_id: Array,
  judged: Array,
  *,
  between: float,
) -> Array:
  """Advantages within the context's group and between groups, [B, T]."""
  rewards = estimates.outcome(token_rewards)
  own = estimates.mean_of_same(rewards, groups, judged)
  prompt = estimates.mean_of_same(rewards, example_id, judged)
  return estimates.per_token(rewards - own + between * (own - prompt), mask)


def nudge(
  algorithm: Algorithm,
  s: Settings,
  *,
  contexts: Sequence[str] = ("",),
  between: float = 1.1,
) -> Algorithm:
  """Draws every prompt in several contexts.

  Args:
    algorithm: any algorithm; its critic is dropped.
    s: settings of the run.
    contexts: Texts before the question.
    between: Weight w of the advantage between contexts.
  """
  return algorithm.change(
    advantages=part(inter_intra, {"between": between}),
    critic=None,
    prompts=Contexts,
    prompt_settings={"contexts": contexts},
  )
