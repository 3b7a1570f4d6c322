"""Turn-level GAE: a turn of an environment is one action.

    δ_k = r_k + γ V(s_{k+1}) - V(s_k),   A_k = δ_k + γ λ A_{k+1}

s_k is the state before the first token of turn k and r_k the sum of the turn's
rewards; every token of the turn has its advantage, and the critic learns at
first tokens alone. Differs from GAE in the number of steps: λ decays over
turns, of which there are few, and not over tokens. A turn is a run of tokens
that the policy wrote; a response without an environment is a single turn.

Known to us from public code, without a paper.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.learner import choices
from jaxrl_llm.learner.parts import Part


def turn_starts(mask) -> jax.Array:
  """bool [B, T]: first token of each turn."""
  return mask & ~jnp.pad(mask, ((0, 0), (1, 0)))[:, :-1]


def make_estimator(settings: choices.Settings) -> Part:
  """Returns GAE over turns, advantages [B, T], with the inputs of GAE."""
  gae = choices.ESTIMATORS["gae"](settings)

  def turn_gae(token_rewards, values, mask, *others) -> jax.Array:
    starts = turn_starts(mask)
    turns = jnp.cumsum(starts, axis=1)

    @jax.vmap
    def of_turn(x, turns):
      return jax.ops.segment_sum(x, turns, x.shape[0] + 1)[turns]

    rewards = of_turn(token_rewards, turns)
    advantages = gae.fn(rewards, values, starts, *others)
    return jnp.where(mask, of_turn(advantages, turns), 0.0)

  return gae._replace(fn=turn_gae)


def turn_value_mask(trainable, truncated) -> jax.Array:
  """bool [B, T]: first tokens of the turns of ended responses."""
  return turn_starts(trainable) & ~truncated[:, None]


choices.ESTIMATORS["turn_gae"] = make_estimator
choices.VALUE_MASKS["turn_gae"] = turn_value_mask
