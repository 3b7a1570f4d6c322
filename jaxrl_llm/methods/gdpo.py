"""GDPO: each part of a reward is normalised separately.

    A_i = Σ_k w_k (r_ik - mean_k) / (std_k + ε)      over the group, per part k

Differs from GRPO, which normalises the sum: two responses with equal sums but
different parts have different advantages, and a part with a small range has the
same influence as the others. `estimator.normalize='whiten'` is its last step,
over the tokens of the batch here and over its responses in the paper.

Reference: GDPO 2026, arXiv:2601.05242.
"""

import jax

from jaxrl_llm import estimators
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import choices, estimates, parts, providers


def make_estimator(settings: choices.Settings) -> parts.Part:
  """Returns the part that reads the parts of the reward in its settings.

  Raises:
    InputError: The settings have no parts.
  """
  weights = dict(settings["parts"]) if "parts" in settings else {}
  if not weights:
    raise InputError(
      "config.estimator.settings: 'gdpo' needs the parts of the reward and"
      " their weights, as in {'parts': {'right': 1.0, 'format': 0.5}}"
    )
  epsilon = settings["epsilon"]

  def gdpo(mask, groups, *rewards) -> jax.Array:
    total = sum(
      weight
      * estimators.group_relative(
        reward, groups, num_groups=groups.shape[0], epsilon=epsilon
      )
      for weight, reward in zip(weights.values(), rewards, strict=True)
    )
    return estimates.per_token(total, mask)

  names = (f"{providers.PART}{name}" for name in weights)
  return parts.Part(gdpo, ("mask", "groups", *names))


choices.ESTIMATORS["gdpo"] = make_estimator
