"""Curricula and estimators of papers, as files of a plugin would have them."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import doors

from jaxrl_llm import register
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.learner import estimates

NONE, MIXED, ALL = range(3)


@chex.dataclass(frozen=True)
class Belief:
  """What is known of each of P prompts."""

  drawn: int
  belief: np.ndarray  # [P, 3]: solved by none, some or all of a group.
  counts: np.ndarray  # [3, 3], transitions to <- from.


def follow(belief, counts, seen):
  """Belief and counts after a step; `seen` maps prompts to what they were."""
  step = counts / counts.sum(0)
  new, flow = belief @ step.T, np.zeros((3, 3))
  for prompt, outcome in seen.items():
    now = np.eye(3)[outcome]
    joint = np.outer(now, belief[prompt]) * step
    flow += joint / joint.sum()
    new[prompt] = now
  return new, 0.7 * counts + 0.3 + flow


class Dps(PromptSource):
  """Asks what is probably solved by some; a few others explore."""

  def init(self):
    belief = np.full((len(self), 3), 1 / 3, np.float32)
    return Belief(drawn=0, belief=belief, counts=np.ones((3, 3), np.float32))

  def draw(self, state, n):
    rng, few = np.random.default_rng(state.drawn), round(0.25 * n)
    mixed = state.belief[:, MIXED] + 1e-6 * rng.random(len(self))
    order = np.argsort(-mixed)
    chosen = [*order[: n - few], *rng.choice(order[n - few :], few, False)]
    prompts = [
      self.prompt(int(i), state.drawn + k) for k, i in enumerate(chosen)
    ]
    return prompts, state.replace(drawn=state.drawn + n)

  def observe(self, state, responses):
    asked, seen = responses.rollout.example_id, {}
    for i in np.unique(asked).tolist():
      solved = responses.correct[asked == i].mean()
      seen[i] = NONE if solved == 0 else ALL if solved == 1 else MIXED
    belief, counts = follow(state.belief, state.counts, seen)
    return state.replace(
      belief=belief.astype(np.float32), counts=counts.astype(np.float32)
    )


def test_dps_by_hand():
  belief, counts = np.full((1, 3), 1 / 3), np.ones((3, 3))
  priors = []
  for outcome in (MIXED, MIXED, ALL):
    priors.append(belief @ (counts / counts.sum(0)).T)
    belief, counts = follow(belief, counts, {0: outcome})
  priors.append(belief @ (counts / counts.sum(0)).T)
  np.testing.assert_allclose(
    np.concatenate(priors),
    [
      [0.3333, 0.3333, 0.3333],
      [0.3, 0.4, 0.3],
      [0.2362, 0.5276, 0.2362],
      [0.3161, 0.3678, 0.3161],
    ],
    atol=1e-4,
  )


def test_dps(model, tmp_path):
  register.prompt_source("dps", Dps)
  rows = doors.train(model, tmp_path / "run", data__order="dps", data__pool=12)
  assert "rollout/again" not in rows[-1]


CONTEXTS = ("", "0+")


class Contexts(PromptSource):
  """NudgeRL: a prompt has a group in each of several contexts."""

  def draw(self, state, n):
    asked, after = super().draw(state, n // len(CONTEXTS))
    first = len(CONTEXTS) * state.drawn
    ids = [prompt.example_id for prompt in asked for _ in CONTEXTS]
    return [self.prompt(i, first + k) for k, i in enumerate(ids)], after

  def prompt(self, example_id, group_id):
    prompt = super().prompt(example_id, group_id)
    text = CONTEXTS[group_id % len(CONTEXTS)]
    tokens = (*self._tokenizer.encode(text), *prompt.tokens) if text else ()
    return dataclasses.replace(
      prompt, tokens=tokens or prompt.tokens, text=text + prompt.text
    )


def inter_intra(token_rewards, mask, groups, example_id, judged):
  """Relative to the context's group, and the group to all of the prompt."""
  rewards = estimates.outcome(token_rewards)

  def mean(key):
    same = (key[:, None] == key[None]) & judged[None]
    total = jnp.sum(jnp.where(same, rewards[None], 0.0), axis=1)
    return total / jnp.maximum(jnp.sum(same, axis=1), 1)

  own = mean(groups)
  return estimates.per_token(
    rewards - own + 1.1 * (own - mean(example_id)), mask
  )


def sharpened(
  token_rewards, correct, mask, groups, old_logprobs, *, center, scale, epsilon
):
  """XRPO: right responses that are unlikely get more."""
  base = estimates.group_advantages(
    token_rewards, mask, groups, center=center, scale=scale, epsilon=epsilon
  )
  total = jnp.sum(jnp.where(mask, old_logprobs, 0), axis=1)
  score = total / jnp.maximum(jnp.sum(mask, axis=1), 1)
  same = groups[:, None] == groups[None]
  mean = jnp.sum(jnp.where(same, score[None], 0), axis=1) / jnp.sum(
    same, axis=1
  )
  advantage = jnp.max(base, axis=1)
  bonus = jnp.clip(1 - jnp.exp(score - mean), 0, jnp.maximum(advantage, 0))
  return base + estimates.per_token(jnp.where(correct, bonus, 0), mask)


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"data__order": "contexts", "estimator__name": "inter_intra"},
    {"estimator__name": "sharpened"},
  ],
)
def test_trains(model, tmp_path, changes):
  register.prompt_source("contexts", Contexts)
  register.estimator("inter_intra", inter_intra)
  register.estimator("sharpened", sharpened)
  rows = doors.train(
    model, tmp_path / "run", data__max_prompt_length=16, **changes
  )
  assert np.isfinite(rows[-1]["policy/loss"])
