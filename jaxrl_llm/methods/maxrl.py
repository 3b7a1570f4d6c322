"""MaxRL: advantages in units of the group's mean reward.

    A_i = (R_i - mean) / mean,   0 where the mean is not positive

Differs from GRPO in the divisor: with rewards of 0 and 1 a prompt weighs by one
over its pass rate, as the gradient of the log-likelihood of a right answer
does.

Reference: Tajwar et al. 2026, arXiv:2602.02710.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm import estimators, register
from jaxrl_llm.learner import estimates


def maxrl(token_rewards, mask, groups) -> jax.Array:
  """Rewards relative to the group's mean and in units of it, [B, T]."""
  rewards = estimates.outcome(token_rewards)
  centered = estimators.group_relative(
    rewards, groups, num_groups=groups.shape[0], scale="none"
  )
  mean = rewards - centered
  advantages = centered / jnp.where(mean > 0, mean, jnp.inf)
  return estimates.per_token(advantages, mask)


register.estimator("maxrl", maxrl)
