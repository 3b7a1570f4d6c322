"""XRPO: correct responses that were unlikely get more.

    A_i += min(max(1 - exp(s_i - mean s), 0), A_i)   where correct and A_i > 0

s is the mean log-prob of a response's tokens, the mean is over its group.
Differs from GRPO in this term alone; the authors also distribute tries by the
uncertainty of a prompt's mean reward, for which see DARS and GDRO.

Reference: Bamba et al. 2025 (XRPO), arXiv:2510.06672.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm import masked, register
from jaxrl_llm.learner import estimates


def sharpened(
  token_rewards, correct, mask, groups, old_logprobs, *, center, scale, epsilon
) -> jax.Array:
  """Group advantages with a bonus for novelty, [B, T]."""
  base = estimates.group_advantages(
    token_rewards, mask, groups, center=center, scale=scale, epsilon=epsilon
  )
  score = masked.masked_mean(old_logprobs, mask, axis=1)
  mean = masked.segment_mean(score, groups, num_segments=len(groups))
  novelty = 1 - jnp.exp(score - jnp.append(mean, 0.0)[groups])
  advantage = jnp.maximum(jnp.max(base, axis=1), 0)
  bonus = jnp.where(correct, jnp.clip(novelty, 0, advantage), 0)
  return base + estimates.per_token(bonus, mask)


register.estimator("sharpened", sharpened)
