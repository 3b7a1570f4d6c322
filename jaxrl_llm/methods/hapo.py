"""HAPO: adapts clipping, advantages and temperature to a token's entropy.

    h = (log H - pivot) / rms, scaled to [-1, 1]        the entropy code
    A_i = (R_i - μ) / (σ + ε), μ and σ over the tokens of the group
    1 - clip_low (1 + max(-h, 0)) ≤ ρ ≤ 1 + clip_high (1 + max(h, 0))

Differs from DAPO in the group statistics, which weight a response by its number
of tokens; in the clip range and the advantage of a token, which depend on its
entropy relative to the batch; and in the sampling temperature. The published
code has the opposite sign for low-entropy tokens (`sign`).

Reference: HAPO 2025, arXiv:2509.16591.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm import distributions, estimators, losses
from jaxrl_llm.errors import check_choice, check_number
from jaxrl_llm.estimators import entropy
from jaxrl_llm.learner import Algorithm, Settings, estimates, part
from jaxrl_llm.learner.algorithm import ProcessorSpec


def token_group(
  token_rewards: Array,
  mask: Array,
  own_lengths: Array,
  groups: Array,
  *,
  epsilon: float,
) -> Array:
  """Advantages from group statistics in which every token counts once."""
  relative = estimators.token_group_relative(
    estimates.outcome(token_rewards),
    own_lengths,
    groups,
    num_groups=groups.shape[0],
    epsilon=epsilon,
  )
  return estimates.per_token(relative, mask)


def entropy_code(entropies: Array, policy_mask: Array, *, sign: str) -> Array:
  """Entropy code of every token relative to its batch, [B, T] in [-1, 1]."""
  statistics = estimators.entropy_statistics(entropies, policy_mask)
  return estimators.entropy_code(entropies, policy_mask, statistics, sign=sign)


def entropy_clip(
  logprobs: Array,
  proximal_logprobs: Array,
  advantages: Array,
  entropy_code: Array,
  *,
  clip_low: float,
  clip_high: float,
  dual_clip: float | None,
) -> losses.ClippedPolicyLoss:
  """PPO's surrogate with clip range and advantages adapted to the entropy."""
  low, high = estimators.adaptive_clip(
    entropy_code, clip_low=clip_low, clip_high=clip_high
  )
  clip = {"clip_low": low, "clip_high": high}
  ratio = jnp.exp(distributions.clamped_log_ratio(logprobs, proximal_logprobs))
  ratio = jax.lax.stop_gradient(ratio)
  advantages = estimators.redistribute(advantages, entropy_code, ratio, **clip)
  return losses.clipped_policy_loss(
    logprobs, proximal_logprobs, advantages, dual_clip=dual_clip, **clip
  )


def adaptive_temperature(
  distribution: Any, _: Any, state: entropy.EntropyStatistics, *, tau: float
):
  """Adapts the temperature to a token's entropy, T (1 + τ h).

  h is computed with the statistics of the previous batch.
  """
  temperature = distribution.temperature
  entropies = distributions.entropy_from_logits(
    distribution.logits / temperature[:, None]
  )
  code = estimators.entropy_code(
    entropies, jnp.ones(entropies.shape, bool), state
  )
  temperature = estimators.adaptive_temperature(
    code, temperature=temperature, tau=tau
  )
  return distribution._replace(temperature=temperature)


def hapo(
  algorithm: Algorithm,
  s: Settings,
  *,
  tau: float = 0.05,
  sign: str = "intended",
) -> Algorithm:
  """Group statistics by token; clip range and temperature by entropy.

  Args:
    algorithm: any algorithm; its critic is dropped.
    s: settings of the run.
    tau: Adapts the sampling temperature T to T (1 + tau h), where h in [-1, 1]
      is the entropy code of the token. 0 keeps T.
    sign: Sign of the entropy code at low entropy: 'intended' as in the paper,
      'released' as in the authors' code.
  """
  check_number("tau", tau, "[0, 1)")
  check_choice("sign", sign, entropy.SIGNS)
  temperature = ProcessorSpec(
    functools.partial(adaptive_temperature, tau=tau),
    state=part(estimators.entropy_statistics, mask="policy_mask"),
    initial=estimators.EntropyStatistics(*[np.zeros((), np.float32)] * 4),
  )
  return algorithm.change(
    advantages=part(token_group, s.estimator),
    critic=None,
    policy_loss=part(entropy_clip, s.loss),
    inputs={"entropy_code": part(entropy_code, {"sign": sign})},
    processors={"entropy_tau": temperature} if tau else {},
    whole_batch=True,
  )
