"""SAO: asynchronous training on single responses with a hard token mask.

    L = -sg[f(ρ)] A log π,   ρ = π / π_behav with the current policy π
    f(ρ) = ρ where 1 - clip_low < ρ < 1 + clip_high, else 0

Differs from VAPO in this loss (DIS, "double-sided importance sampling"): the
ratio of a token is taken against the policy that sampled it, without a
recomputed policy in between, and tokens outside the bounds are dropped on
either side, whatever the sign of their advantage. The rest of the method, which
has a critic, is settings, see configs/sao.py. With clip_low 0.5 and clip_high 4
it is the loss of INTELLECT-3. IcePop masks by the policy before the update and
keeps PPO's clip: `off_policy.correction='mask'`.

Reference: SAO 2026, arXiv:2607.07508; Prime Intellect 2025 (INTELLECT-3),
arXiv:2512.16144.
"""

import chex
import jax.numpy as jnp

from jaxrl_llm import distributions, losses
from jaxrl_llm.learner import Algorithm, Settings, part


def dis_loss(
  logprobs: chex.Array,
  old_logprobs: chex.Array,
  advantages: chex.Array,
  *,
  clip_low: chex.Numeric,
  clip_high: chex.Numeric,
) -> losses.ClippedPolicyLoss:
  """Policy gradient at tokens whose ratio is inside an open interval.

  Args:
    logprobs: [...], log-probabilities under the current policy.
    old_logprobs: [...], log-probabilities under the policy that sampled.
    advantages: [...].
    clip_low: ratios of at most 1 - clip_low are rejected; SAO uses 0.3.
    clip_high: ratios of at least 1 + clip_high are rejected; SAO uses 5.

  Returns:
    A `losses.ClippedPolicyLoss`, as from `losses.rejection_policy_loss`.
  """
  ratio = jnp.exp(distributions.clamped_log_ratio(logprobs, old_logprobs))
  rejected = (ratio <= 1.0 - clip_low) | (ratio >= 1.0 + clip_high)
  return losses.rejection_policy_loss(
    logprobs, old_logprobs, advantages, rejected
  )


def sao(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Rejects single tokens that are far from the sampler (DIS)."""
  loss = part(dis_loss, s.loss, old_logprobs="proximal_logprobs")
  return algorithm.change(policy_loss=loss)
