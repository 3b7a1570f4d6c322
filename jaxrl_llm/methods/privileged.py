"""Privileged critic: reads the answer before the prompt.

    V(s) = f(answer, s)

Differs from VAPO's critic in its input. A baseline may depend on anything but
the action, so the answer adds no bias to advantages; the policy never reads it.
Selected by value.answer_format, with any estimator that has a critic.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.learner import choices
from jaxrl_llm.types import Rollout


def make_view(value: Mapping[str, Any]) -> Callable[..., Rollout]:
  """Makes the view that puts the answer before the prompt of each sample.

  Arrays of prompts become wider by `answer_tokens`, whatever the lengths of the
  answers, so that shapes do not change.

  Args:
    value: config group `value`.
  """
  text, most = value["answer_format"], value["answer_tokens"]

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

  return view


choices.VIEWS["answer_format"] = make_view
