"""Privileged critic: reads the answer before the prompt.

    V(s) = f(answer, s)

Differs from VAPO's critic in its input. A baseline may depend on anything but
the action, so the answer adds no bias to advantages; the policy never reads it.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.learner import Algorithm, Settings, View
from jaxrl_llm.types import Rollout


def make_view(text: str, most: int) -> View:
  """Makes the view that puts the answer before the prompt of each sample.

  Arrays of prompts become wider by `most`, whatever the lengths of the answers,
  so that shapes do not change.

  Args:
    text: text with {answer}.
    most: maximum number of its tokens; the rest is cut.
  """

  def view(
    answer: Callable[[int], str], tokenizer: Tokenizer, rollout: Rollout
  ) -> Rollout:
    ids = rollout.example_id.tolist()
    encode = lambda row: tokenizer.encode(text.replace("{answer}", answer(row)))
    tokens = {row: encode(row)[:most] for row in set(ids)}
    before = np.asarray([len(tokens[row]) for row in ids], np.int32)
    prompts = np.pad(rollout.prompt_tokens, [(0, 0), (0, most)])
    for prompt, row in zip(prompts, ids):
      prompt[:] = [*tokens[row], *prompt][: prompt.size]
    return rollout.replace(
      prompt_tokens=prompts, prompt_lengths=rollout.prompt_lengths + before
    )

  return View(view, most)


def privileged(
  algorithm: Algorithm,
  s: Settings,
  *,
  answer_format: str = "{answer}",
  answer_tokens: int = 32,
) -> Algorithm:
  """Lets the critic read the answer before the prompt.

  Args:
    algorithm: an algorithm with a critic.
    s: settings of the run.
    answer_format: Text with {answer} that the critic reads.
    answer_tokens: Maximum number of its tokens, at least 1; the rest is cut.
  """
  check_number("answer_tokens", answer_tokens, "[1, inf)")
  if "{answer}" not in answer_format:
    raise InputError("method.privileged.answer_format has no {answer}; add it")
  if algorithm.critic is None:
    raise InputError("'privileged' needs a critic; use estimator.name='gae'")
  view = make_view(answer_format, answer_tokens)
  critic = dataclasses.replace(algorithm.critic, view=view)
  return algorithm.change(critic=critic)
