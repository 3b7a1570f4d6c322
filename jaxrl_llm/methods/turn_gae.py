"""Turn-level GAE: each turn of the model is one action.

    δ_k = r_k + γ V(s_{k+1}) - V(s_k),   A_k = δ_k + γ λ A_{k+1}

s_k is the state before the first token of turn k and r_k the sum of the turn's
rewards; all tokens of a turn share its advantage, and the critic is trained
only at first tokens. Differs from GAE in the number of steps: λ decays over a
few turns instead of many tokens. A turn is a contiguous run of tokens sampled
by the policy: there is at least one other token between two turns, because a
response whose environment replies with nothing ends, and is left out of every
loss. A response without an environment is a single turn.

Based on public code; we know of no paper.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Algorithm, Part, Settings, part


def turn_starts(mask: Array) -> Array:
  """bool [B, T]: first token of each turn."""
  return mask & ~jnp.pad(mask, ((0, 0), (1, 0)))[:, :-1]


def over_turns(gae: Part) -> Part:
  """Returns GAE over turns, advantages [B, T], as a part with GAE's inputs."""

  def advantages_of_turns(
    token_rewards: Array, values: Array, mask: Array, *others
  ) -> Array:
    starts = turn_starts(mask)
    turns = jnp.cumsum(starts, axis=1)

    @jax.vmap
    def of_turn(x: Array, turns: Array):
      return jax.ops.segment_sum(x, turns, x.shape[0] + 1)[turns]

    rewards = of_turn(token_rewards, turns)
    advantages = gae.fn(rewards, values, starts, *others)
    return jnp.where(mask, of_turn(advantages, turns), 0.0)

  return gae._replace(fn=advantages_of_turns)


def turn_value_mask(trainable: Array, truncated: Array) -> Array:
  """bool [B, T]: first tokens of the turns of ended responses."""
  return turn_starts(trainable) & ~truncated[:, None]


def turn_gae(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Makes each turn one action of GAE."""
  if s.estimator.name != "gae" or algorithm.critic is None:
    raise InputError("'turn_gae' changes GAE; use estimator.name='gae'")
  if (s.estimator.gamma, s.estimator.lambda_value) != (1, 1):
    raise InputError(
      "returns of 'turn_gae' are sums of rewards; use estimator.gamma=1 and"
      " estimator.lambda_value=1"
    )
  mask = part(turn_value_mask)
  return algorithm.change(
    advantages=over_turns(algorithm.advantages),
    critic=dataclasses.replace(algorithm.critic, mask=mask),
  )
