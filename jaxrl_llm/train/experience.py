"""From rewards, log-probs and values to what the losses consume, [B, T]."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import masked
from jaxrl_llm.train.packing import Layout, PackedTokens
from jaxrl_llm.train.recipe import Recipe
from jaxrl_llm.train.step import PolicyBatch, ValueBatch
from jaxrl_llm.types import Experience, Rollout


def token_rewards(rewards: chex.Array, lengths: chex.Array, room: int):
  """Outcome reward [B] on the last response token, zeros elsewhere [B, T]."""
  last = jnp.arange(room)[None] == lengths[:, None] - 1
  return jnp.where(last, rewards[:, None], 0.0).astype(jnp.float32)


def make_experience(
  rewards: chex.Array,
  correct: chex.Array,
  judged: chex.Array,
  lengths: chex.Array,
  mask: chex.Array,
  old_logprobs: chex.Array,
  values: chex.Array,
  *,
  recipe: Recipe,
) -> Experience:
  """Advantages, critic targets and masks of one batch of ended responses.

  Args:
    rewards: float32 [B], outcome rewards.
    correct: bool [B], the verifier's verdict.
    judged: bool [B], False where the verifier failed: such a response is left
      out of every loss instead of being trained on a made-up reward.
    lengths: int32 [B].
    mask: bool [B, T].
    old_logprobs: float32 [B, T].
    values: float32 [B, T].
    recipe: the method.

  Returns:
    `Experience` of [B, T] arrays.
  """
  chex.assert_rank([rewards, correct, judged, lengths, mask], [1, 1, 1, 1, 2])
  chex.assert_equal_shape([mask, old_logprobs, values])
  outcome = token_rewards(
    jnp.where(judged, rewards, 0.0), lengths, mask.shape[1]
  )
  inputs = (outcome, values, mask, lengths)
  trained = mask & judged[:, None]
  return Experience(
    old_logprobs=old_logprobs,
    advantages=jax.lax.stop_gradient(recipe.advantages(*inputs)),
    old_values=values,
    returns=jax.lax.stop_gradient(recipe.returns(*inputs)),
    policy_mask=trained,
    value_mask=trained,
    positive_mask=trained & correct[:, None],
  )


def policy_batch(
  experience: Experience,
  rows: np.ndarray,
  packed: PackedTokens,
  layout: Layout,
  *,
  recipe: Recipe,
) -> PolicyBatch:
  """Packs the given rows of an experience; weights are over these rows.

  Token-mean over the mini-batch (VAPO eq. 7-8) and μ times the token-mean over
  its correct responses (eq. 9-10), both fixed before any micro-batching.
  """
  pick = lambda x: np.asarray(x)[rows]
  mask = pick(experience.policy_mask)
  weights = masked.token_weights(mask, mode=recipe.loss_mode)
  positive = masked.token_weights(
    pick(experience.positive_mask), mode="token-mean"
  )
  return PolicyBatch(
    packed=packed.replace(mask=layout.scatter(mask)),
    old_logprobs=layout.scatter(pick(experience.old_logprobs)),
    advantages=layout.scatter(pick(experience.advantages)),
    weights=layout.scatter(weights),
    nll_weights=layout.scatter(recipe.nll_coefficient * positive),
  )


def value_batch(
  experience: Experience,
  rows: np.ndarray,
  packed: PackedTokens,
  layout: Layout,
) -> ValueBatch:
  """Packs the given rows for the critic, a token-mean over them."""
  pick = lambda x: np.asarray(x)[rows]
  mask = pick(experience.value_mask)
  return ValueBatch(
    packed=packed.replace(mask=layout.scatter(mask)),
    old_values=layout.scatter(pick(experience.old_values)),
    returns=layout.scatter(pick(experience.returns)),
    weights=layout.scatter(masked.token_weights(mask, mode="token-mean")),
  )


def experience_metrics(
  experience: Experience, rollout: Rollout, rewards: np.ndarray
) -> dict[str, float]:
  """What a practitioner reads about a batch before the update."""
  mask = np.asarray(experience.policy_mask)
  advantages = np.asarray(experience.advantages)[mask]
  drift = np.abs(
    np.asarray(experience.old_logprobs) - rollout.behavior_logprobs
  )[mask]
  groups = [rewards[rollout.group == g] for g in np.unique(rollout.group)]
  return {
    "reward/mean": float(rewards.mean()),
    "reward/std": float(rewards.std()),
    "advantage/mean": float(advantages.mean()) if mask.any() else 0.0,
    "advantage/std": float(advantages.std()) if mask.any() else 0.0,
    "value/explained_variance": explained_variance(experience),
    "sampler_trainer/logprob_diff_mean": float(drift.mean())
    if mask.any()
    else 0.0,
    "sampler_trainer/logprob_diff_max": float(drift.max(initial=0.0)),
    "rollout/zero_variance_groups": float(
      np.mean([np.ptp(g) == 0 for g in groups])
    ),
  }


def explained_variance(experience: Experience) -> float:
  """1 − Var(G − V) / Var(G) of values that have not seen these returns."""
  return float(
    masked.explained_variance(
      experience.old_values, experience.returns, experience.value_mask
    )
  )
