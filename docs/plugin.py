"""An example plugin: a reward, source of questions, input, loss and method.

scripts/train.py --config=configs/grpo.py --plugin=docs/plugin.py
  --config.data.source=doubles --config.data.settings="{'largest': 40}"
  --config.reward.name=digits --config.reward.weights="{'length': 0.1}"
  --config.loss.name=early --config.method.use=shortest
"""

import jax.numpy as jnp

from jaxrl_llm import losses, register
from jaxrl_llm.data.tasks import Example
from jaxrl_llm.learner import part


def digits(response, answer, *, finished):  # Or any column of the data.
  right = finished and response.endswith(f"#{answer}.")
  return {"right": float(right), "length": 1 - min(len(response), 40) / 40}


def doubles(*, largest):  # Some questions are held out for evaluation.
  numbers = range(1, largest + 1)
  return [Example(f"{n}", f"{n}+{n}?", f"{2 * n}", "doubles") for n in numbers]


def to_come(tokens, lengths):  # [B, T], fraction of the response still to come.
  return 1.0 - jnp.arange(tokens.shape[1])[None] / lengths[:, None]


def early(logprobs, proximal_logprobs, advantages, to_come, *, clip_high):
  """PPO's loss with only the upper clip, and more weight on early tokens."""
  credit, clip = to_come * advantages, {"clip_low": 1.0, "clip_high": clip_high}
  return losses.clipped_policy_loss(logprobs, proximal_logprobs, credit, **clip)


def least(own_lengths):  # Tokens of the shortest response of a batch.
  return own_lengths.min()


def shortest(algorithm, s):
  """Logs own/shortest; see Algorithm for all that a method can change."""
  return algorithm.change(metrics={"shortest": part(least)})


register.reward("digits", digits)
register.source("doubles", doubles)
register.token_input("to_come", to_come)
register.loss("early", early)
register.method("shortest", shortest)
