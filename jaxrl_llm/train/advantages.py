"""Advantages by name: from what a batch of responses was to [B, T].

Each estimator is made once from the config group `estimator` and then sees
`Episodes` alone.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import estimators
from jaxrl_llm.types import Status


@chex.dataclass(frozen=True)
class Episodes:
  """What estimators see of B responses of up to T tokens."""

  token_rewards: chex.Array  # float32 [B, T].
  values: chex.Array  # float32 [B, T], V of the state before each token.
  next_values: chex.Array  # float32 [B], V of the state after the last token.
  mask: chex.Array  # bool [B, T].
  lengths: chex.Array  # int32 [B], tokens so far.
  status: chex.Array  # int32 [B], a `Status`.
  truncated: chex.Array  # bool [B], the response will continue.
  groups: chex.Array  # int32 [B], in [0, B), or B where not judged.
  old_logprobs: chex.Array  # float32 [B, T].
  behavior_logprobs: chex.Array  # float32 [B, T].


Advantages = Callable[[Episodes], jax.Array]
MaskStep = Callable[[jax.Array, Episodes], jax.Array]


def constant_lambda(lengths: chex.Array, *, lambda_: float) -> jax.Array:
  """The same λ for every response."""
  return jnp.full(lengths.shape, lambda_, jnp.float32)


LAMBDA_SCHEDULES: Mapping[str, Callable[..., Callable]] = {
  "constant": lambda settings: functools.partial(
    constant_lambda, lambda_=settings.lambda_policy
  ),
  "length_adaptive": lambda settings: functools.partial(
    estimators.length_adaptive_lambda, alpha=settings.alpha
  ),
}


def egae_advantages(
  episodes: Episodes, *, gamma: float, boundary: str, lambda_fn: Callable
) -> jax.Array:
  """GAE with a λ of each response's own; EGAE where one is unfinished.

  VAPO, arXiv 2504.05118, equations 4 and 5; T-PPO, arXiv 2506.15050,
  equation 6. Without unfinished responses this is GAE bit for bit.
  """
  return estimators.egae(
    episodes.token_rewards,
    episodes.values,
    episodes.mask,
    episodes.truncated,
    gamma=gamma,
    lambda_=lambda_fn(episodes.lengths),
    boundary=boundary,
    next_values=episodes.next_values,
  )


def outcome(episodes: Episodes) -> jax.Array:
  """One reward per response, [B]: the sum over its tokens."""
  return jnp.sum(episodes.token_rewards, axis=1)


def per_token(advantages: chex.Array, episodes: Episodes) -> jax.Array:
  """The same advantage for every token of a response, [B] -> [B, T]."""
  return jnp.where(episodes.mask, advantages[:, None], 0.0)


def relative_outcome(episodes: Episodes, **settings: Any) -> jax.Array:
  """Outcomes relative to those of the group, [B]; settings of the estimator."""
  return estimators.group_relative(
    outcome(episodes),
    episodes.groups,
    num_groups=episodes.groups.shape[0],
    **settings,
  )


def group_advantages(
  episodes: Episodes, *, center: str, scale: str, epsilon: float
) -> jax.Array:
  """GRPO and its kin: relative to the other responses to the prompt."""
  relative = relative_outcome(
    episodes, center=center, scale=scale, epsilon=epsilon
  )
  return per_token(relative, episodes)


def token_group_advantages(episodes: Episodes, *, epsilon: float) -> jax.Array:
  """HAPO's group statistics, which weigh a response by its tokens."""
  relative = estimators.token_group_relative(
    outcome(episodes),
    episodes.lengths,
    episodes.groups,
    num_groups=episodes.groups.shape[0],
    epsilon=epsilon,
  )
  return per_token(relative, episodes)


def reward_to_go(episodes: Episodes, *, gamma: float) -> jax.Array:
  """REINFORCE++: Σ of the rewards from a token on."""
  return estimators.lambda_returns(
    episodes.token_rewards,
    jnp.zeros_like(episodes.values),
    episodes.mask,
    gamma=gamma,
    lambda_=1.0,
  )


def centered_reward_to_go(
  episodes: Episodes, *, gamma: float, center: str
) -> jax.Array:
  """REINFORCE++ with a baseline: the reward to go less the group's center."""
  relative = relative_outcome(episodes, center=center, scale="none")
  baseline = per_token(outcome(episodes) - relative, episodes)
  return reward_to_go(episodes, gamma=gamma) - baseline


def optimal_baseline_advantages(episodes: Episodes) -> jax.Array:
  """VCPO: R − b with the baseline of least variance off policy.

  The squared norm of a response's gradient is taken as its length.
  """
  rewards = outcome(episodes)
  baseline = estimators.optimal_baseline(
    rewards,
    sequence_weights(
      episodes.old_logprobs, episodes.behavior_logprobs, episodes.mask
    ),
    episodes.lengths.astype(jnp.float32),
    episodes.groups,
    num_groups=episodes.groups.shape[0],
  )
  return per_token(rewards - baseline, episodes)


def sequence_weights(
  old_logprobs: chex.Array, behavior_logprobs: chex.Array, mask: chex.Array
) -> jax.Array:
  """π_old / π_behaviour of whole responses, [B, T] -> [B], not truncated."""
  log_ratio = jnp.where(mask, old_logprobs - behavior_logprobs, 0.0)
  return jnp.exp(jnp.clip(jnp.sum(log_ratio, axis=1), -20.0, 20.0))


def lambda_targets(
  episodes: Episodes, *, gamma: float, lambda_: float
) -> jax.Array:
  """Critic targets under a λ of the critic's own; λ = 1 is Monte Carlo."""
  return estimators.lambda_returns(
    episodes.token_rewards,
    episodes.values,
    episodes.mask,
    gamma=gamma,
    lambda_=lambda_,
  )


def _gae(settings):
  return functools.partial(
    egae_advantages,
    gamma=settings.gamma,
    boundary=settings.boundary,
    lambda_fn=LAMBDA_SCHEDULES[settings.lambda_schedule](settings),
  )


def _group(settings):
  return functools.partial(
    group_advantages,
    center=settings.center,
    scale=settings.scale,
    epsilon=settings.epsilon,
  )


def _reward_to_go(settings):
  if settings.center == "none":
    return functools.partial(reward_to_go, gamma=settings.gamma)
  return functools.partial(
    centered_reward_to_go, gamma=settings.gamma, center=settings.center
  )


# Name -> (config group estimator) -> Advantages.
ADVANTAGES: dict[str, Callable[[Any], Advantages]] = {
  "gae": _gae,
  "group": _group,
  "token_group": lambda settings: functools.partial(
    token_group_advantages, epsilon=settings.epsilon
  ),
  "reward_to_go": _reward_to_go,
  "optimal_baseline": lambda settings: optimal_baseline_advantages,
}


def in_window(mask: chex.Array, window_start: chex.Array) -> jax.Array:
  """Tokens that this step's window wrote; the prefix is context."""
  return mask & (jnp.arange(mask.shape[1])[None] >= window_start[:, None])


def without_overlong(mask: chex.Array, episodes: Episodes) -> jax.Array:
  """DAPO's overlong filtering: a response that was cut teaches nothing."""
  return mask & (episodes.status != int(Status.OVERLONG))[:, None]


def without_pivot(mask: chex.Array, episodes: Episodes) -> jax.Array:
  """MC-GRPO: the median response was only sampled as a baseline."""
  pivot = estimators.median_pivot(
    outcome(episodes), episodes.groups, num_groups=episodes.groups.shape[0]
  )
  return mask & ~pivot[:, None]


def without_tail(
  mask: chex.Array, episodes: Episodes, *, tokens: int
) -> jax.Array:
  """The last tokens before a cut, whose advantages know least."""
  return estimators.drop_tail(mask, episodes.truncated, tokens=tokens)
