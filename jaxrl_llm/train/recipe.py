"""A recipe: the mathematical choices of a method, as functions.

A recipe is built once from plain settings by small dictionaries from name to
function; two methods are two choices of functions, never a flag inside one.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import estimators, losses

# (lengths [B]) -> lambda_ [B].
LambdaFn = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What an iteration computes.

  Attributes:
    advantages: (token_rewards, values, mask, lengths) [B, T] -> [B, T].
    returns: the same arguments -> targets of the critic [B, T].
    policy_loss: (logprobs, old_logprobs, advantages) -> per-token loss.
    value_loss: (values, returns, old_values) -> per-token loss.
    loss_mode: mode of `masked.token_weights` for the policy loss.
    nll_coefficient: μ of the positive-example language-model loss.
  """

  advantages: Callable[..., jax.Array]
  returns: Callable[..., jax.Array]
  policy_loss: Callable[..., losses.ClippedPolicyLoss]
  value_loss: Callable[..., losses.ClippedValueLoss]
  loss_mode: str
  nll_coefficient: float


def constant_lambda(lengths: chex.Array, *, lambda_: float) -> jax.Array:
  """The same λ for every response."""
  return jnp.full(lengths.shape, lambda_, jnp.float32)


LAMBDA_SCHEDULES: Mapping[str, Callable[..., LambdaFn]] = {
  "constant": lambda settings: functools.partial(
    constant_lambda, lambda_=settings.lambda_policy
  ),
  "length_adaptive": lambda settings: functools.partial(
    estimators.length_adaptive_lambda, alpha=settings.alpha
  ),
}


def gae_advantages(
  token_rewards: chex.Array,
  values: chex.Array,
  mask: chex.Array,
  lengths: chex.Array,
  *,
  gamma: float,
  lambda_fn: LambdaFn,
) -> jax.Array:
  """GAE with a λ of each response's own (VAPO, arXiv 2504.05118, eq. 4-5)."""
  return estimators.gae(
    token_rewards, values, mask, gamma=gamma, lambda_=lambda_fn(lengths)
  )


def lambda_targets(
  token_rewards: chex.Array,
  values: chex.Array,
  mask: chex.Array,
  lengths: chex.Array,
  *,
  gamma: float,
  lambda_: float,
) -> jax.Array:
  """Critic targets under a λ of the critic's own; λ = 1 is Monte Carlo."""
  del lengths
  return estimators.lambda_returns(
    token_rewards, values, mask, gamma=gamma, lambda_=lambda_
  )


def make_recipe(*, estimator: Any, loss: Any) -> Recipe:
  """Recipe of the config groups `estimator` and `loss`.

  Args:
    estimator: gamma, lambda_schedule, lambda_policy, alpha, lambda_value.
    loss: clip_low, clip_high, dual_clip, clip_value, mode, nll_coefficient.

  Raises:
    KeyError: a name is not in its dictionary (the config refuses it before).
  """
  lambda_fn = LAMBDA_SCHEDULES[estimator.lambda_schedule](estimator)

  def value_loss(values, returns, old_values):
    clipped = loss.clip_value is not None
    return losses.clipped_value_loss(
      values,
      returns,
      old_values=old_values if clipped else None,
      clip_value=loss.clip_value,
    )

  return Recipe(
    advantages=functools.partial(
      gae_advantages, gamma=estimator.gamma, lambda_fn=lambda_fn
    ),
    returns=functools.partial(
      lambda_targets,
      gamma=estimator.gamma,
      lambda_=estimator.lambda_value,
    ),
    policy_loss=functools.partial(
      losses.clipped_policy_loss,
      clip_low=loss.clip_low,
      clip_high=loss.clip_high,
      dual_clip=loss.dual_clip,
    ),
    value_loss=value_loss,
    loss_mode=loss.mode,
    nll_coefficient=loss.nll_coefficient,
  )
