"""MaxRL: advantages in units of the group's mean reward.

    A_i = (R_i - mean) / mean,   0 where the mean is not positive

Differs from GRPO in the divisor: with rewards of 0 and 1, each prompt is
weighted by the inverse of its pass rate, as in the gradient of the
log-likelihood of a correct answer. Penalties are refused: with a mean close to
0, advantages would have any size.

Reference: Tajwar et al. 2026, arXiv:2602.02710.
"""

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import estimators
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Algorithm, Settings, estimates, part


def in_means(token_rewards: Array, mask: Array, groups: Array) -> Array:
  """Rewards minus the group's mean, divided by that mean, [B, T]."""
  rewards = estimates.outcome(token_rewards)
  centered = estimators.group_relative(
    rewards, groups, num_groups=groups.shape[0], scale="none"
  )
  mean = rewards - centered
  # Rewards that cancel may have a mean of 1e-8 instead of 0.
  positive = mean > 1e-6 * jnp.abs(centered)
  advantages = centered / jnp.where(positive, mean, jnp.inf)
  return estimates.per_token(advantages, mask)


def maxrl(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Divides advantages by the mean reward of the group."""
  negative = {
    "reward.incorrect": s.reward.incorrect < 0,
    "reward.overlong_buffer": s.reward.overlong_buffer,
    "loss.kl_reward_coefficient": s.loss.kl_reward_coefficient,
  }
  for key, below in negative.items():
    if below:
      raise InputError(
        "'maxrl' divides by the mean reward, so rewards must not be negative;"
        f" use {key}=0"
      )
  advantages = part(in_means)
  return algorithm.change(advantages=advantages, critic=None, lowest_reward=0.0)
