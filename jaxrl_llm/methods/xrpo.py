"""XRPO: a novelty bonus for unlikely correct responses.

    A_i += min(max(1 - exp(s_i - mean s), 0), A_i)   where correct and A_i > 0

s is the mean log-prob of a response's tokens, and the mean is over its group.
Differs from GRPO only in this term. The authors also allocate responses by the
uncertainty of a prompt's mean reward; see DARS and GDRO for that.

Reference: Bamba et al. 2025 (XRPO), arXiv:2510.06672.
"""

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import masked
from jaxrl_llm.learner import Algorithm, Settings, estimates, part, then


def sharpened(
  advantages: Array,
  correct: Array,
  mask: Array,
  groups: Array,
  old_logprobs: Array,
) -> Array:
  """Group advantages with a bonus for novelty, [B, T]."""
  score = masked.masked_mean(old_logprobs, mask, axis=1)
  mean = masked.segment_mean(score, groups, num_segments=len(groups))
  novelty = 1 - jnp.exp(score - jnp.append(mean, 0.0)[groups])
  most = jnp.maximum(jnp.max(advantages, axis=1), 0)
  bonus = jnp.where(correct, jnp.clip(novelty, 0, most), 0)
  return advantages + estimates.per_token(bonus, mask)


def xrpo(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Adds a bonus for novelty to group advantages."""
  return algorithm.change(
    advantages=then(algorithm.advantages, part(sharpened))
  )
