"""DPPO: a trust region on the divergence of a token's distributions.

    L = -sg[min(ρ, cap)] A log π, 0 where D > delta and A (ρ - 1) > 0
    D = |π - π_behav| (TV), or KL(π_behav ‖ π) of "this token or another one"

Differs from PPO's clip, a bound of the ratio, in that rare tokens may change
by a large factor and frequent ones only by a small one. Like the clip, it only
drops tokens whose update would leave the region further. Without logits the
divergences are those of two outcomes.

The bounds 0.2 (TV) and 0.05 (KL) and the cap of 20 are those of public
implementations.

Reference: DPPO 2026, arXiv:2602.04879.
"""

import chex
import jax.numpy as jnp

from jaxrl_llm import losses, register


def dppo_tv_loss(
  logprobs: chex.Array,
  old_logprobs: chex.Array,
  advantages: chex.Array,
  *,
  delta: chex.Numeric = 0.2,
  cap: chex.Numeric = 20.0,
) -> losses.ClippedPolicyLoss:
  """DPPO with the total variation, |π - π_old| of the sampled token.

  Args:
    logprobs: [...], log-probabilities under the current policy.
    old_logprobs: [...], log-probabilities under the policy that sampled.
    advantages: [...].
    delta: largest divergence of a token that still moves away.
    cap: largest importance weight.

  Returns:
    As `losses.rejection_policy_loss`.
  """
  divergence = jnp.abs(jnp.exp(logprobs) - jnp.exp(old_logprobs))
  return _loss(logprobs, old_logprobs, advantages, divergence, delta, cap)


def dppo_kl_loss(
  logprobs: chex.Array,
  old_logprobs: chex.Array,
  advantages: chex.Array,
  *,
  delta: chex.Numeric = 0.05,
  cap: chex.Numeric = 20.0,
) -> losses.ClippedPolicyLoss:
  """DPPO with `losses.binary_kl`; arguments as in `dppo_tv_loss`."""
  divergence = losses.binary_kl(old_logprobs, logprobs)
  return _loss(logprobs, old_logprobs, advantages, divergence, delta, cap)


def _loss(logprobs, old_logprobs, advantages, divergence, delta, cap):
  """Rejects tokens beyond delta that A moves further away."""
  away = advantages * (logprobs - old_logprobs) > 0
  return losses.rejection_policy_loss(
    logprobs, old_logprobs, advantages, away & (divergence > delta), cap=cap
  )


register.loss("dppo_tv", dppo_tv_loss, old_logprobs="proximal_logprobs")
register.loss("dppo_kl", dppo_kl_loss, old_logprobs="proximal_logprobs")
