"""Inputs computed from other inputs: rewards, masks, advantages, targets.

Plain functions of a batch of B responses of up to T tokens; the names of their
arguments are the inputs that they read (see `parts`):

  mask, version, behavior_logprobs      [B, T], from the rollout
  turn_rewards                          [B, T], from the rollout
  lengths, status, window_start, group  [B], from the rollout
  rewards, correct, judged              [B], verdicts
  old_logprobs, entropies, ref_logprobs [B, T], from the policies
  values [B, T], next_values [B]        from the critic
  update_version                        scalar, policy version before the update
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import estimators
from jaxrl_llm.errors import InputError
from jaxrl_llm.types import Status


def own_lengths(mask) -> jax.Array:
  """int32 [B]: tokens written by the policy, without tokens it only read."""
  return jnp.sum(mask, axis=1, dtype=jnp.int32)


def truncated(status) -> jax.Array:
  """bool [B]: the response continues in a later step."""
  return status == int(Status.TRUNCATED)


def groups(group, judged) -> jax.Array:
  """int32 [B]: group of each response; B, an unused group, if not judged."""
  return jnp.where(judged, group, group.shape[0])


def trainable(mask, judged) -> jax.Array:
  """bool [B, T]: tokens that may enter a loss: those of judged responses."""
  return mask & judged[:, None]


def value_mask(trainable, truncated) -> jax.Array:
  """bool [B, T]: tokens that the critic trains on: those of ended responses."""
  return trainable & ~truncated[:, None]


def last_value_mask(trainable, truncated) -> jax.Array:
  """bool [B, T]: last token that the critic trains on in each response."""
  mask = value_mask(trainable, truncated)
  following = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]
  return mask & (following == 1)


def checked_advantages(advantages, trainable) -> jax.Array:
  """Refuses advantages that are not per token."""
  return _per_token("estimator.name", advantages, trainable)


def still_trainable(mask, trainable) -> jax.Array:
  """bool [B, T]: a mask without tokens that it added, such as padding."""
  _per_token("loss.masks", mask, trainable)
  if mask.dtype != bool:
    raise InputError(
      f"config.loss.masks: a mask returned {mask.dtype}, not bool; compare, as"
      " in mask & (x > 0)"
    )
  return mask & trainable


def _per_token(key: str, made, trainable):
  """Refuses results of a user's part that are not per token."""
  shape = getattr(made, "shape", type(made).__name__)
  if shape != trainable.shape:
    raise InputError(
      f"config.{key}: this part returned {shape}, not an array of shape"
      f" {trainable.shape}; return a value for every token, such as"
      " x[:, None] * mask"
    )
  return made


def in_window(unwindowed_policy_mask, window_start) -> jax.Array:
  """bool [B, T]: tokens written in this step; the prefix is context."""
  place = jnp.arange(unwindowed_policy_mask.shape[1])[None]
  return unwindowed_policy_mask & (place >= window_start[:, None])


def positive_mask(unwindowed_policy_mask, correct, status) -> jax.Array:
  """bool [B, T]: all tokens of responses that are correct and finished."""
  example = correct & (status == int(Status.FINISHED))
  return unwindowed_policy_mask & example[:, None]


def outcome_on_token(
  rewards: chex.Array, mask: chex.Array, lengths: chex.Array
) -> jax.Array:
  """Places outcome rewards [B] on one token of each response, [B, T].

  This is the last unmasked token: estimators skip masked tokens, and a reward
  there would be lost. In an entirely masked response, it is the last token. All
  other tokens have 0.

  Args:
    rewards: float32 [B].
    mask: bool [B, T], response tokens that may carry loss.
    lengths: int32 [B], response tokens, masked ones included.
  """
  place = jnp.arange(mask.shape[1])[None]
  unmasked = jnp.max(jnp.where(mask, place, -1), axis=1)
  last = jnp.where(unmasked >= 0, unmasked, lengths - 1)
  there = place == last[:, None]
  return jnp.where(there, rewards[:, None], 0.0).astype(jnp.float32)


def token_rewards(shaped_rewards, judged, truncated, mask, lengths):
  """float32 [B, T]: shaped reward of each ended response, on one token."""
  known = jnp.where(judged & ~truncated, shaped_rewards, 0.0)
  return outcome_on_token(known, mask, lengths)


def turn_rewards_on_tokens(
  shaped_rewards, turn_rewards, judged, truncated, mask, lengths
):
  """Like `token_rewards`, with the reward of each turn on its last token.

  The remaining reward is on the last token of the response, so that the sum
  equals that of `token_rewards`. An unfinished response has the rewards of its
  turns so far.
  """
  given = jnp.where(judged[:, None], turn_rewards, 0.0)
  rest = shaped_rewards - jnp.sum(given, axis=1)
  return given + token_rewards(rest, judged, truncated, mask, lengths)


def soft_overlong(rewards, own_lengths, *, max_length, buffer, factor):
  """Rewards with DAPO's soft overlong punishment, [B]."""
  return rewards + estimators.soft_overlong_punishment(
    own_lengths, max_length=max_length, buffer=buffer, factor=factor
  )


def policy_lambda(lengths, *, lambda_policy) -> jax.Array:
  """The same λ for every response, [B]."""
  return jnp.full(lengths.shape, lambda_policy, jnp.float32)


def outcome(token_rewards: chex.Array) -> jax.Array:
  """One reward per response, [B]: the sum over its tokens."""
  return jnp.sum(token_rewards, axis=1)


def per_token(advantages: chex.Array, mask: chex.Array) -> jax.Array:
  """The same advantage for every token of a response, [B] -> [B, T]."""
  return jnp.where(mask, advantages[:, None], 0.0)


def mean_of_same(
  x: chex.Array, key: chex.Array, counted: chex.Array
) -> jax.Array:
  """Mean of x over the counted rows that have the same key, [B]."""
  same = (key[:, None] == key[None]) & counted[None]
  total = jnp.sum(jnp.where(same, x[None], 0.0), axis=1)
  return total / jnp.maximum(jnp.sum(same, axis=1), 1)


def group_advantages(
  token_rewards, mask, groups, *, center, scale, epsilon
) -> jax.Array:
  """Group-relative advantages of GRPO and its variants, [B, T]."""
  relative = estimators.group_relative(
    outcome(token_rewards),
    groups,
    num_groups=groups.shape[0],
    center=center,
    scale=scale,
    epsilon=epsilon,
  )
  return per_token(relative, mask)


def without_overlong(mask, status) -> jax.Array:
  """DAPO's overlong filtering: masks responses cut off at the length limit."""
  return mask & (status != int(Status.OVERLONG))[:, None]


def without_tail(mask, truncated, *, tail_drop) -> jax.Array:
  """Masks the last tokens before a cut: their advantages are least reliable."""
  return estimators.drop_tail(mask, truncated, tokens=tail_drop)


def same(x: chex.Array) -> jax.Array:
  """An input under another name."""
  return x
