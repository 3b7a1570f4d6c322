"""EVPO: uses the critic as baseline only while it explains the returns.

    A = GAE of the critic if EV > 0, else R - mean
    EV = 1 - Var(G - V) / Var(G) over the tokens of the batch

Differs from VAPO in batches where the explained variance is not positive: there
the critic would add variance, and the baseline is the mean of the group or,
without groups, of the batch. The critic is trained in any case. If all returns
are equal, EV is 0.

Reference: Pan et al. 2026, arXiv:2604.19485.
"""

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import masked
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Algorithm, Settings, estimates, part, then


def advantages_if_explained(
  advantages: Array,
  token_rewards: Array,
  mask: Array,
  groups: Array,
  values: Array,
  returns: Array,
  value_mask: Array,
) -> Array:
  """GAE, or rewards minus their mean if the critic explains nothing, [B, T].

  The explained variance is that of the critic's targets; the values are from
  before training on these returns.
  """
  size = groups.shape[0]
  batch = jnp.where(groups < size, 0, size)
  several = jnp.any(masked.segment_count(groups, num_segments=size) > 1)
  by_mean = estimates.group_advantages(
    token_rewards,
    mask,
    jnp.where(several, groups, batch),
    center="mean",
    scale="none",
    epsilon=0.0,
  )
  explained = masked.explained_variance(values, returns, value_mask)
  return jnp.where(explained > 0, advantages, by_mean)


def evpo(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Uses the critic as the baseline only while it explains the returns."""
  if algorithm.critic is None:
    raise InputError("'evpo' needs a critic; use estimator.name='gae'")
  advantages = then(algorithm.advantages, part(advantages_if_explained))
  return algorithm.change(advantages=advantages, whole_batch=True)
