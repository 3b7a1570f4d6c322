"""REINFORCE++: reward-to-go, with or without a group baseline.

    A_t = Σ_{k≥t} γ^(k-t) r_k               'center' is 'none'
    A_t = Σ_{k≥t} γ^(k-t) r_k - center_g    otherwise

Differs from PPO in that there is no critic: advantages are instead whitened
over the whole batch (`estimator.normalize`). AReaL uses the same advantages
without a baseline.

Reference: Hu et al. 2025, arXiv:2501.03262.
"""

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import estimators
from jaxrl_llm.learner import Algorithm, Settings, estimates, part


def reward_to_go(token_rewards: Array, mask: Array, *, gamma: float) -> Array:
  """Discounted sum of rewards from each token onwards, [B, T]."""
  return estimators.lambda_returns(
    token_rewards, jnp.zeros_like(token_rewards), mask, gamma=gamma, lambda_=1.0
  )


def centered_reward_to_go(
  token_rewards: Array, mask: Array, groups: Array, *, gamma: float, center: str
) -> Array:
  """Reward-to-go minus the center of the group, [B, T].

  The center is that of undiscounted rewards of complete responses, and the same
  for every token. If a reward comes before the last token, or gamma < 1, late
  tokens have more variance than with a per-token baseline, but no bias.
  """
  rewards = estimates.outcome(token_rewards)
  relative = estimators.group_relative(
    rewards, groups, num_groups=groups.shape[0], center=center, scale="none"
  )
  baseline = estimates.per_token(rewards - relative, mask)
  return reward_to_go(token_rewards, mask, gamma=gamma) - baseline


def reinforce_pp(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Uses the reward-to-go minus the baseline of `estimator.center`, if any."""
  centered = s.estimator.center != "none"
  fn = centered_reward_to_go if centered else reward_to_go
  return algorithm.change(advantages=part(fn, s.estimator), critic=None)
