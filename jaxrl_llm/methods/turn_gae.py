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

import jax
import jax.numpy as jnp

from jaxrl_llm.learner import choices
from jaxrl_llm.learner.parts import Part


def turn_starts(mask) -> jax.Array:
  """bool [B, T]: first token of each turn."""
  return mask & ~jnp.pad(mask, ((0, 0), (1, 0)))[:, :-1]


def make_estimator(settings: choices.Settings) -> Part:
  """Returns GAE over turns, advantages [B, T], as a part with GAE's inputs."""
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
