"""GDPO: each part of a reward is normalised separately.

    A_i = Σ_k w_k (r_ik - mean_k) / (std_k + ε)      over the group, per part k

Differs from GRPO, which normalises the sum: two responses with equal sums but
different parts have different advantages, and a part with a small range has the
same influence as the others. `estimator.normalize='whiten'` is its last step,
over the tokens of the batch here and over its responses in the paper.

Reference: GDPO 2026, arXiv:2601.05242.
"""

from collections.abc import Mapping

from jax import Array

from jaxrl_llm import estimators
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Algorithm, Part, Settings, estimates, providers


def gdpo(
  algorithm: Algorithm, s: Settings, *, parts: Mapping[str, float] = {}
) -> Algorithm:
  """Normalises each part of the reward by itself.

  Args:
    algorithm: any algorithm; its critic is dropped.
    s: settings of the run.
    parts: Weight of each part of the reward, by name.

  Raises:
    InputError: There are no parts.
  """
  if not parts:
    raise InputError(
      "'gdpo' needs the parts of the reward and their weights; give"
      " method.gdpo.parts such as {'right': 1.0, 'format': 0.5}"
    )
  epsilon = s.estimator.epsilon

  def advantages(mask: Array, groups: Array, *rewards) -> Array:
    total = sum(
      weight
      * estimators.group_relative(
        reward, groups, num_groups=groups.shape[0], epsilon=epsilon
      )
      for weight, reward in zip(parts.values(), rewards, strict=True)
    )
    return estimates.per_token(total, mask)

  reads = ("mask", "groups", *(f"{providers.PART}{name}" for name in parts))
  return algorithm.change(advantages=Part(advantages, reads), critic=None)
