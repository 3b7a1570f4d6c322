"""Inputs that are made of other inputs: rewards, masks, advantages, targets.

Plain functions of a batch of B responses of up to T tokens; the names of their
arguments are the inputs that they read (see `parts`):

  mask, version, behavior_logprobs      [B, T], of the rollout
  turn_rewards                          [B, T], likewise
  lengths, status, window_start, group  [B], likewise
  rewards, correct, judged              [B], verdicts
  old_logprobs, entropies, ref_logprobs [B, T], of the policies
  writer_logprobs [B, T]                of the weights that wrote each token
  gradient_norms                        [B], ‖∇ log π‖ of whole responses
  values [B, T], next_values [B]        of the critic
  update_version                        scalar, that the update starts from
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import estimators
from jaxrl_llm.types import Status


def own_lengths(mask) -> jax.Array:
  """int32 [B]: tokens that the policy wrote, without those that it read."""
  return jnp.sum(mask, axis=1, dtype=jnp.int32)


def truncated(status) -> jax.Array:
  """bool [B]: the response goes on in a later step."""
  return status == int(Status.TRUNCATED)


def groups(group, judged) -> jax.Array:
  """int32 [B]: the group of each response; B, an empty one, if not judged."""
  return jnp.where(judged, group, group.shape[0])


def trainable(mask, judged) -> jax.Array:
  """bool [B, T]: tokens that may enter a loss, those of judged responses."""
  return mask & judged[:, None]


def value_mask(trainable, truncated) -> jax.Array:
  """bool [B, T]: tokens of the critic, of responses that have ended."""
  return trainable & ~truncated[:, None]


def last_value_mask(trainable, truncated) -> jax.Array:
  """bool [B, T]: of each response's tokens of the critic the last one."""
  mask = value_mask(trainable, truncated)
  following = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]
  return mask & (following == 1)


def in_window(unwindowed_policy_mask, window_start) -> jax.Array:
  """bool [B, T]: tokens that this step wrote; the prefix is context."""
  place = jnp.arange(unwindowed_policy_mask.shape[1])[None]
  return unwindowed_policy_mask & (place >= window_start[:, None])


def positive_mask(unwindowed_policy_mask, correct, status) -> jax.Array:
  """bool [B, T]: all tokens of responses that are right and have an end."""
  example = correct & (status == int(Status.FINISHED))
  return unwindowed_policy_mask & example[:, None]


def outcome_on_token(
  rewards: chex.Array, mask: chex.Array, lengths: chex.Array
) -> jax.Array:
  """Outcome reward [B] on one token of each response, zeros elsewhere [B, T].

  It is the last unmasked token: estimators pass over masked ones, and a reward
  there would be lost. A response that is masked whole has it on its last token.

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
  """float32 [B, T]: rewards of what has ended, on tokens."""
  known = jnp.where(judged & ~truncated, shaped_rewards, 0.0)
  return outcome_on_token(known, mask, lengths)


def turn_rewards_on_tokens(
  shaped_rewards, turn_rewards, judged, truncated, mask, lengths
):
  """Like `token_rewards`, with the reward of each turn on its last token.

  The rest of a response's reward is on its own last token, so that the sum is
  that of `token_rewards`. One that goes on has its turns so far.
  """
  given = jnp.where(judged[:, None], turn_rewards, 0.0)
  rest = shaped_rewards - jnp.sum(given, axis=1)
  return given + token_rewards(rest, judged, truncated, mask, lengths)


def soft_overlong(rewards, own_lengths, *, max_length, buffer, factor):
  """Rewards less DAPO's soft overlong punishment, [B]."""
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
  """Mean of x over the counted rows with the same key as a row's, [B]."""
  same = (key[:, None] == key[None]) & counted[None]
  total = jnp.sum(jnp.where(same, x[None], 0.0), axis=1)
  return total / jnp.maximum(jnp.sum(same, axis=1), 1)


def group_advantages(
  token_rewards, mask, groups, *, center, scale, epsilon
) -> jax.Array:
  """GRPO and its kin: relative to the other responses to the prompt."""
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
  """DAPO's overlong filtering: a response that was cut teaches nothing."""
  return mask & (status != int(Status.OVERLONG))[:, None]


def without_tail(mask, truncated, *, tail_drop) -> jax.Array:
  """The last tokens before a cut, whose advantages know least."""
  return estimators.drop_tail(mask, truncated, tokens=tail_drop)


def same(x: chex.Array) -> jax.Array:
  """An input under another name."""
  return x
