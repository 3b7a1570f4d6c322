"""From rewards, log-probs and values to what the losses consume, [B, T]."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import estimators, losses, masked
from jaxrl_llm.train.advantages import Episodes, in_window
from jaxrl_llm.train.packing import MiniBatch
from jaxrl_llm.train.recipe import Recipe
from jaxrl_llm.train.step import PolicyBatch, ValueBatch
from jaxrl_llm.types import Experience, Rollout, Status


def token_rewards(rewards: chex.Array, lengths: chex.Array, room: int):
  """Outcome reward [B] on the last response token, zeros elsewhere [B, T]."""
  last = jnp.arange(room)[None] == lengths[:, None] - 1
  return jnp.where(last, rewards[:, None], 0.0).astype(jnp.float32)


@chex.dataclass(frozen=True)
class Scores:
  """What the models say about a rollout before an update."""

  old_logprobs: chex.Array  # float32 [B, T], proximal policy.
  entropies: chex.Array  # float32 [B, T], nats; zeros unless needed.
  ref_logprobs: chex.Array  # float32 [B, T], initial policy; zeros likewise.
  values: chex.Array  # float32 [B, T]; zeros without a critic.
  next_values: chex.Array  # float32 [B], after the last token.


def make_experience(
  rewards: chex.Array,
  correct: chex.Array,
  judged: chex.Array,
  rollout: Rollout,
  scores: Scores,
  *,
  recipe: Recipe,
) -> Experience:
  """Advantages, critic targets and masks of one batch of responses.

  A truncated response has no reward yet: its window trains the policy on what
  the critic expects (EGAE), and it trains the critic only once it has ended.

  Args:
    rewards: float32 [B], outcome rewards of ended responses.
    correct: bool [B], the verifier's verdict.
    judged: bool [B], False where the verifier failed: such a response is left
      out of every loss instead of being trained on a made-up reward.
    rollout: the responses.
    scores: what the models say.
    recipe: the method.

  Returns:
    `Experience` of [B, T] arrays.
  """
  chex.assert_rank([rewards, correct, judged, rollout.mask], [1, 1, 1, 2])
  chex.assert_equal_shape([rollout.mask, scores.old_logprobs, scores.values])
  episodes = _episodes(rewards, judged, rollout, scores, recipe)
  trained = rollout.mask & judged[:, None]
  policy_mask = in_window(trained, rollout.window_start)
  for step in recipe.policy_masks:
    policy_mask = step(policy_mask, episodes)
  advantages, returns = _credit(episodes, policy_mask, recipe)
  ended = ~episodes.truncated
  return jax.lax.stop_gradient(
    Experience(
      old_logprobs=scores.old_logprobs,
      behavior_logprobs=rollout.behavior_logprobs,
      advantages=advantages,
      old_values=scores.values,
      returns=returns,
      policy_mask=policy_mask,
      value_mask=trained & ended[:, None],
      positive_mask=policy_mask & (correct & ended)[:, None],
      columns=_columns(rollout, scores, policy_mask, recipe),
    )
  )


def _episodes(rewards, judged, rollout, scores, recipe) -> Episodes:
  """What the estimators see; rewards are shaped and lie on tokens here."""
  mask, truncated = rollout.mask, rollout.status == int(Status.TRUNCATED)
  shaped = rewards
  if recipe.shape_rewards is not None:
    shaped = recipe.shape_rewards(rewards, rollout.lengths)
  outcome = token_rewards(
    jnp.where(judged & ~truncated, shaped, 0.0), rollout.lengths, mask.shape[1]
  )
  if recipe.kl_reward_coefficient:
    outcome = estimators.penalize_kl(
      outcome,
      scores.old_logprobs,
      scores.ref_logprobs,
      mask,
      coefficient=recipe.kl_reward_coefficient,
    )
  return Episodes(
    token_rewards=outcome,
    values=scores.values,
    next_values=scores.next_values,
    mask=mask,
    lengths=rollout.lengths,
    status=rollout.status,
    truncated=truncated,
    # Without a verdict a response is nobody's baseline.
    groups=jnp.where(judged, rollout.group, mask.shape[0]),
    old_logprobs=scores.old_logprobs,
    behavior_logprobs=rollout.behavior_logprobs,
  )


def _credit(episodes, mask, recipe) -> tuple[jax.Array, jax.Array]:
  """Advantages, normalised over the mask, and the critic's targets, [B, T]."""
  advantages = recipe.advantages(episodes)
  if recipe.normalize is not None:
    advantages = recipe.normalize(advantages, mask)
  if recipe.returns is None:
    return advantages, jnp.zeros_like(advantages)
  return advantages, recipe.returns(episodes)


def _columns(rollout, scores, mask, recipe) -> dict[str, jax.Array]:
  """Further inputs of the policy loss, those that the recipe reads."""
  made = {
    "ref_logprobs": lambda: scores.ref_logprobs,
    "entropy_code": lambda: recipe.entropy_code(scores.entropies, mask),
    "blend": lambda: blend(rollout.version, mask),
  }
  return {name: made[name]() for name in recipe.columns if name in made}


def blend(version: chex.Array, mask: chex.Array) -> jax.Array:
  """A-3PO's share of the current policy in every token's π_prox, [B, T].

  The proximal policy is the one that the update starts from, which wrote the
  newest tokens; the policy in the making counts as the version after it.
  """
  newest = jnp.max(jnp.where(mask, version, 0))
  share = losses.interpolation_share(
    version, proximal_version=newest, current_version=newest + 1
  )
  return jnp.where(mask, share, 0.0)


def policy_batch(
  experience: Experience,
  batch: MiniBatch,
  *,
  recipe: Recipe,
  old_logprobs: chex.Array | None = None,
) -> PolicyBatch:
  """Packs the rows of a mini-batch; weights are over these rows.

  The reduction over the mini-batch (VAPO eq. 7-8: its token mean) and μ times
  the token mean over its correct responses (eq. 9-10) are fixed before any
  micro-batching. An off-policy correction multiplies the weights; the
  denominator stays that of all tokens.

  Args:
    experience: of the whole step.
    batch: the rows and where they lie.
    recipe: the method.
    old_logprobs: [b, T] of these rows, in place of the experience's.
  """
  pick = lambda x: np.asarray(x)[batch.rows]
  mask = pick(experience.policy_mask)
  if old_logprobs is None:
    old_logprobs = pick(experience.old_logprobs)
  behavior = pick(experience.behavior_logprobs)
  reduction = masked.token_weights(
    mask, mode=recipe.loss_mode, norm=recipe.loss_norm
  )
  weights, scale = reduction, None
  if recipe.correction is not None:
    corrected = recipe.correction(old_logprobs, behavior, mask)
    weights = reduction * corrected.weights
  if recipe.step_scale is not None:
    scale = np.float32(recipe.step_scale(old_logprobs, behavior, mask))
  columns = {
    "old_logprobs": lambda: old_logprobs,
    "advantages": lambda: pick(experience.advantages),
    "weights": lambda: weights,
    "nll_weights": lambda: masked.token_weights(
      pick(experience.positive_mask), mode="token-mean"
    ),
    "regularizer_weights": lambda: reduction,
  } | {name: lambda x=x: pick(x) for name, x in experience.columns.items()}
  layout = batch.layout
  return PolicyBatch(
    packed=batch.packed.replace(mask=layout.scatter(mask)),
    columns={n: layout.scatter(columns[n]()) for n in recipe.columns},
    step_scale=scale,
  )


def value_batch(experience: Experience, batch: MiniBatch) -> ValueBatch:
  """Packs the rows of a mini-batch for the critic, a token mean over them."""
  pick = lambda x: np.asarray(x)[batch.rows]
  mask = pick(experience.value_mask)
  scatter = batch.layout.scatter
  return ValueBatch(
    packed=batch.packed.replace(mask=scatter(mask)),
    old_values=scatter(pick(experience.old_values)),
    returns=scatter(pick(experience.returns)),
    weights=scatter(masked.token_weights(mask, mode="token-mean")),
  )


def experience_metrics(
  experience: Experience, rollout: Rollout, recipe: Recipe
) -> dict[str, float]:
  """What a practitioner reads about a batch before the update."""
  mask = np.asarray(experience.policy_mask)
  advantages = np.asarray(experience.advantages)[mask]
  old = np.asarray(experience.old_logprobs)
  drift = np.abs(old - rollout.behavior_logprobs)[mask]
  row = {
    "advantage/mean": _mean(advantages),
    "advantage/std": float(advantages.std()) if mask.any() else 0.0,
    "sampler_trainer/logprob_diff_mean": _mean(drift),
    "sampler_trainer/logprob_diff_max": float(drift.max(initial=0.0)),
  }
  if recipe.returns is not None:
    row["value/explained_variance"] = explained_variance(experience)
  if recipe.correction is not None:
    corrected = recipe.correction(old, rollout.behavior_logprobs, mask)
    row |= {
      "correction/weight_mean": _mean(np.asarray(corrected.weights)[mask]),
      "correction/kept": _mean(np.asarray(corrected.keep)[mask]),
    }
  return row


def explained_variance(experience: Experience) -> float:
  """1 − Var(G − V) / Var(G) of values that have not seen these returns."""
  return float(
    masked.explained_variance(
      experience.old_values, experience.returns, experience.value_mask
    )
  )


def _mean(x: Any) -> float:
  return float(np.mean(x)) if np.size(x) else 0.0
