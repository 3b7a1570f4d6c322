"""DPPO: a trust region on the divergence of a token's distributions.

    L = -sg[min(ρ, cap)] A log π, 0 where D > delta and A (ρ - 1) > 0
    D = |π - π_behav| (TV), or KL(π_behav ‖ π) of "this token or any other"

Differs from PPO's clip, which bounds the ratio, in that rare tokens may change
by a large factor and frequent tokens only by a small one. Like the clip, it
only drops tokens whose update would move further out of the region. As no
logits are available, the divergences are those of the two outcomes "this token"
and "any other".

The bounds 0.2 (TV) and 0.05 (KL) and the cap of 20 are from public
implementations.

Reference: DPPO 2026, arXiv:2602.04879.
"""

import chex
import jax.numpy as jnp

from jaxrl_llm import losses
from jaxrl_llm.errors import check_choice
from jaxrl_llm.learner import Algorithm, Settings, part


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
    delta: divergence above which a token may not move further away.
    cap: largest importance weight.

  Returns:
    A `losses.ClippedPolicyLoss`, as from `losses.rejection_policy_loss`.
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


def _loss(
  logprobs: chex.Array,
  old_logprobs: chex.Array,
  advantages: chex.Array,
  divergence: chex.Array,
  delta: chex.Numeric,
  cap: chex.Numeric,
):
  """Rejects tokens beyond delta that the update would move further away."""
  away = advantages * (logprobs - old_logprobs) > 0
  return losses.rejection_policy_loss(
    logprobs, old_logprobs, advantages, away & (divergence > delta), cap=cap
  )


LOSSES = {"tv": dppo_tv_loss, "kl": dppo_kl_loss}


def dppo(
  algorithm: Algorithm,
  s: Settings,
  *,
  divergence: str = "tv",
  delta: float | None = None,
  cap: float = 20.0,
) -> Algorithm:
  """Rejects tokens whose distribution has moved too far.

  Args:
    algorithm: any algorithm.
    s: settings of the run.
    divergence: Total variation ('tv') or KL divergence ('kl') of a token.
    delta: Divergence above which a token may not move further away; None is
      0.2 for 'tv' and 0.05 for 'kl'.
    cap: Largest importance weight.
  """
  check_choice("divergence", divergence, LOSSES)
  bounds = {"cap": cap} if delta is None else {"cap": cap, "delta": delta}
  loss = part(LOSSES[divergence], bounds, old_logprobs="proximal_logprobs")
  return algorithm.change(policy_loss=loss)
