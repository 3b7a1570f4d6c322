"""Two parts of GRPO in DeepSeek-V3.2: a sequence mask and an unbiased KL.

    L = PPO's clip, 0 where A < 0 and mean_t log(π_old / π) > delta
    KL = (π / π_behav) k3(π, π_ref)

The mask differs from `off_policy.correction=mask` in that it uses the current
policy, takes the mean over a response, and never drops tokens with positive
advantages. The KL differs from k3 in the importance weight, which has a
gradient: whichever policy sampled the tokens, value and gradient are unbiased
estimates of those of KL(π ‖ π_ref).

The paper does not state delta; 0.5 is our choice.

Reference: DeepSeek-AI 2025, arXiv:2512.02556, section 3.1.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import distributions, losses, masked
from jaxrl_llm.learner import Algorithm, Settings, part


def clip_off_policy_mask_loss(
  logprobs: chex.Array,
  old_logprobs: chex.Array,
  advantages: chex.Array,
  mask: chex.Array,
  segments: chex.Array | None = None,
  *,
  clip_low: chex.Numeric,
  clip_high: chex.Numeric,
  dual_clip: chex.Numeric | None = None,
  delta: chex.Numeric = 0.5,
) -> losses.ClippedPolicyLoss:
  """PPO's clip without strongly off-policy responses of negative advantage.

  Args:
    logprobs: [..., T], log-probabilities under the current policy.
    old_logprobs: [..., T], log-probabilities under the policy that sampled.
    advantages: [..., T].
    mask: [..., T], True at response tokens.
    segments: as in `losses.gspo_loss`.
    clip_low: as in `losses.clipped_policy_loss`.
    clip_high: as in `losses.clipped_policy_loss`.
    dual_clip: as in `losses.clipped_policy_loss`.
    delta: largest mean of log(π_old / π) over a response that is kept.

  Returns:
    A `losses.ClippedPolicyLoss`. A dropped token has no gradient, counts in
    the denominator and is flagged in clipped_low.
  """
  logprobs, old_logprobs = (
    masked.masked_fill(x, mask) for x in (logprobs, old_logprobs)
  )
  clip = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
  out = losses.clipped_policy_loss(logprobs, old_logprobs, advantages, **clip)
  distance = losses.mean_over_sequence(-out.log_ratio, mask, segments)
  dropped = (advantages < 0) & (distance > delta)
  return out._replace(
    loss=jnp.where(dropped, 0.0, out.loss),
    clipped_low=out.clipped_low | dropped,
  )


def unbiased_kl(
  logprobs: chex.Array, ref_logprobs: chex.Array, behavior_logprobs: chex.Array
) -> jax.Array:
  """KL estimate k3 times the importance weight of the token, π / π_behav.

  Args:
    logprobs: [...], log-probabilities under the current policy.
    ref_logprobs: [...], log-probabilities under the reference.
    behavior_logprobs: [...], log-probabilities under the policy that sampled.

  Returns:
    float32 [...], at least 0.
  """
  log_ratio = distributions.clamped_log_ratio(logprobs, behavior_logprobs)
  return jnp.exp(log_ratio) * losses.kl_k3(logprobs, ref_logprobs)


def deepseek_v3_2(
  algorithm: Algorithm, s: Settings, *, delta: float = 0.5
) -> Algorithm:
  """Masks off-policy responses, and makes the KL loss unbiased if there is one.

  Args:
    algorithm: any algorithm.
    s: settings of the run.
    delta: Largest mean of log(π_old / π) over a response that is kept.
  """
  bounds = {**s.loss, "delta": delta}
  fn = clip_off_policy_mask_loss
  loss = part(fn, bounds, old_logprobs="proximal_logprobs")
  kl = {}
  if biased := algorithm.auxiliary.get("kl"):
    kl["kl"] = biased._replace(loss=part(unbiased_kl))
  return algorithm.change(policy_loss=loss, auxiliary=kl)
