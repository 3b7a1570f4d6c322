"""MC-GRPO: the median of a group of odd size is its baseline.

    A_i = (R_i - median) / (scale + ε)

Differs from GRPO in the center, and in that each group samples one response
more than it trains on: the advantage of the median response is 0, and the mask
in this file removes it from the loss. The advantages come from the estimator
'group' with the center 'median'.

Reference: MC-GRPO 2026, arXiv:2601.22582.
"""

from jax import Array

from jaxrl_llm import estimators
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Algorithm, Settings, estimates, part


def without_pivot(mask: Array, token_rewards: Array, groups: Array) -> Array:
  """Masks the median response, which serves only as the baseline."""
  pivot = estimators.median_pivot(
    estimates.outcome(token_rewards), groups, num_groups=groups.shape[0]
  )
  return mask & ~pivot[:, None]


def mc_grpo(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Leaves each group's median response out of the policy loss."""
  if (s.estimator.name, s.estimator.center) != ("group", "median"):
    raise InputError(
      "the pivot is a group's median; use estimator.name='group' and"
      " estimator.center='median'"
    )
  if s.data.group_size % 2 == 0:
    raise InputError(
      "only groups of odd size have a median response; change data.group_size"
    )
  return algorithm.change(masks=(part(without_pivot),))
