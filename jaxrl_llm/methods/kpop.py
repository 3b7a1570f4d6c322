"""KPop: IcePop's token mask with a KL bound instead of bounds of the ratio.

    L = -sg[ρ] A log π, 0 where max(KL(π ‖ π_behav), KL(π_behav ‖ π)) > delta

Differs from DIS (`methods/sao.py`) in the mask: each KL is that of "this token
or any other", so that rare tokens may change by a larger factor than frequent
ones. Differs from DPPO in that the mask ignores the advantage.

The authors mask by the policy before the update, as IcePop does, and keep PPO's
clip; here the mask follows the current policy. They do not state delta.

Reference: Guo et al. 2026 (KPop), https://ringtech.notion.site/kpop.
"""

import chex
import jax.numpy as jnp

from jaxrl_llm import losses
from jaxrl_llm.learner import Algorithm, Settings, part


def kpop_loss(
  logprobs: chex.Array,
  old_logprobs: chex.Array,
  advantages: chex.Array,
  *,
  delta: chex.Numeric = 0.05,
) -> losses.ClippedPolicyLoss:
  """Policy gradient at tokens whose two KLs are at most delta.

  Args:
    logprobs: [...], log-probabilities under the current policy.
    old_logprobs: [...], log-probabilities under the policy that sampled.
    advantages: [...].
    delta: largest KL at which a token is trained on.

  Returns:
    A `losses.ClippedPolicyLoss`, as from `losses.rejection_policy_loss`.
  """
  divergence = jnp.maximum(
    losses.binary_kl(logprobs, old_logprobs),
    losses.binary_kl(old_logprobs, logprobs),
  )
  return losses.rejection_policy_loss(
    logprobs, old_logprobs, advantages, divergence > delta
  )


def kpop(
  algorithm: Algorithm, s: Settings, *, delta: float = 0.05
) -> Algorithm:
  """Trains on the tokens whose two KLs are small.

  Args:
    algorithm: any algorithm.
    s: settings of the run.
    delta: Largest KL at which a token is trained on.
  """
  bound = {"delta": delta}
  loss = part(kpop_loss, bound, old_logprobs="proximal_logprobs")
  return algorithm.change(policy_loss=loss)
