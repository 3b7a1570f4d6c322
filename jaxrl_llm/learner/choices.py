"""The choices that a config names: from a name to a part.

Every table goes from name to a maker (config group -> part) or to a function
whose settings are bound elsewhere; it is the only place that knows the choice.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import distributions, estimators, losses
from jaxrl_llm.learner import estimates
from jaxrl_llm.learner.parts import Part, part

Settings = Mapping[str, Any]


def _reward_to_go(settings: Settings) -> Part:
  if settings["center"] == "none":
    return part(estimates.reward_to_go, settings)
  return part(estimates.centered_reward_to_go, settings)


def maker_of(
  fn: Callable[..., Any], **inputs: str
) -> Callable[[Settings], Part]:
  """(settings) -> the part of a function; see `parts.part`."""
  return functools.partial(part, fn, **inputs)


# Name -> (config group estimator) -> advantages [B, T].
ESTIMATORS: dict[str, Callable[[Settings], Part]] = {
  # GAE with a λ of each response's own; EGAE where one is unfinished.
  "gae": maker_of(
    estimators.egae, lambda_="policy_lambda", next_values="next_values"
  ),
  "group": maker_of(estimates.group_advantages),
  "token_group": maker_of(estimates.token_group_advantages),
  "reward_to_go": _reward_to_go,
  "optimal_baseline": maker_of(estimates.optimal_baseline_advantages),
}

# Name -> (config group estimator) -> λ of each response [B].
LAMBDA_RULES: Mapping[str, Callable[[Settings], Part]] = {
  "constant": maker_of(estimates.policy_lambda),
  "length_adaptive": maker_of(
    estimators.length_adaptive_lambda, lengths="own_lengths"
  ),
}

# Name -> where the rewards of an environment lie, [B, T].
TOKEN_REWARDS: Mapping[str, Callable[..., jax.Array]] = {
  "end": estimates.token_rewards,
  "turns": estimates.turn_rewards_on_tokens,
}

# Name -> (config group estimator) -> ‖∇ log π‖² of each response [B], up to a
# constant factor.
GRADIENT_NORMS: Mapping[str, Callable[[Settings], Part]] = {
  "length": maker_of(estimates.length_as_squared_norm),
  "exact": maker_of(estimates.squared_norms),
}

# Name -> (advantages, policy_mask) -> advantages; None leaves them.
NORMALIZATIONS: Mapping[str, Callable[..., jax.Array] | None] = {
  "none": None,
  "whiten": estimators.whiten,
  "scale": functools.partial(estimators.whiten, center=False),
}

# Masks of the policy loss by the setting that enables them: (mask, inputs) ->
# mask.
MASKS: Mapping[str, Callable[..., jax.Array]] = {
  "overlong_filter": estimates.without_overlong,
  "drop_pivot": estimates.without_pivot,
  "tail_drop": estimates.without_tail,
}

# Likewise of one's own: name -> (mask, inputs) -> mask.
OWN_MASKS: dict[str, Callable[..., jax.Array]] = {}


def hapo(
  logprobs,
  proximal_logprobs,
  advantages,
  entropy_code,
  *,
  clip_low,
  clip_high,
  dual_clip,
):
  """HAPO: clip range and advantage of a token follow its entropy."""
  low, high = estimators.adaptive_clip(
    entropy_code, clip_low=clip_low, clip_high=clip_high
  )
  ratio = jnp.exp(distributions.clamped_log_ratio(logprobs, proximal_logprobs))
  advantages = estimators.redistribute(
    advantages,
    entropy_code,
    jax.lax.stop_gradient(ratio),
    clip_low=low,
    clip_high=high,
  )
  return losses.clipped_policy_loss(
    logprobs,
    proximal_logprobs,
    advantages,
    clip_low=low,
    clip_high=high,
    dual_clip=dual_clip,
  )


def interpolated_clip(
  logprobs,
  behavior_logprobs,
  advantages,
  interpolation_share,
  *,
  clip_low,
  clip_high,
  dual_clip,
  cap,
  floor,
):
  """A-3PO: PPO's surrogate around a mixture of behaviour and current policy.

  π_prox is interpolated and costs no forward pass; π_prox / π_b weighs the
  loss.
  """
  return losses.decoupled_policy_loss(
    logprobs,
    losses.mixed_logprobs(logprobs, behavior_logprobs, interpolation_share),
    behavior_logprobs,
    advantages,
    clip_low=clip_low,
    clip_high=clip_high,
    dual_clip=dual_clip,
    cap=cap,
    floor=floor,
  )


_surrogate = functools.partial(maker_of, old_logprobs="proximal_logprobs")
# Name -> (config group loss) -> `losses.ClippedPolicyLoss`.
POLICY_LOSSES: dict[str, Callable[[Settings], Part]] = {
  "clip": _surrogate(losses.clipped_policy_loss),
  "gspo": _surrogate(losses.gspo_loss),
  "cispo": _surrogate(losses.cispo_loss),
  "policy_gradient": _surrogate(losses.policy_gradient_loss),
  "hapo": maker_of(hapo),
}

KL_ESTIMATES = {
  "k1": losses.kl_k1,
  "k2": losses.kl_k2,
  "k3": losses.kl_k3,
  "k1+": losses.kl_k1_plus,
  "k3+": losses.kl_k3_plus,
}

CORRECTIONS: Mapping[str, Callable[..., losses.Correction] | None] = {
  "none": None,
  "truncate": losses.truncated_importance,
  "mask": losses.masked_importance,
}


def has_critic(config: Any) -> bool:
  """Whether the estimator of a config reads values, so that a critic learns."""
  settings = config.estimator.to_dict()
  return "values" in ESTIMATORS[config.estimator.name](settings).reads


def correction_of(config: Any) -> tuple[str, float]:
  """The off-policy correction that a config asks for, and its upper bound."""
  settings = config.off_policy
  averaged = settings.proximal == "ewma"
  schedule = config.schedule
  # Responses go on in later steps, or are trained then.
  stale = schedule.stop != "all" or schedule.lag > 0
  name = settings.correction
  if name == "auto":
    # With the sampler's log-probs as proximal ones the ratio corrects already.
    corrects = averaged or (stale and settings.proximal != "stored")
    name = "truncate" if corrects else "none"
  if settings.high is not None:
    return name, settings.high
  return name, 100.0 if averaged else 2.0


# Whom the policy loss takes its ratio against: the input it begins with.
PROXIMALS: Mapping[str, str] = {
  "recompute": "old_logprobs",
  "stored": "behavior_logprobs",
  "interpolate": "behavior_logprobs",
  "ewma": "old_logprobs",  # Until the average is scored for a mini-batch.
}


def ess_step_scale(
  old_logprobs: chex.Array,
  behavior_logprobs: chex.Array,
  policy_mask: chex.Array,
  *,
  ess_reference: float,
) -> jax.Array:
  """VCPO's factor of a step, min(1, √(effective sample ratio / reference)).

  A mini-batch whose weights leave fewer samples than usual moves less; one
  that leaves more does not move farther than the learning rate says.
  """
  weights = estimates.sequence_weights(
    old_logprobs, behavior_logprobs, policy_mask
  )
  ratio = losses.effective_sample_ratio(weights, jnp.any(policy_mask, axis=1))
  return jnp.minimum(1.0, jnp.sqrt(ratio / ess_reference))
