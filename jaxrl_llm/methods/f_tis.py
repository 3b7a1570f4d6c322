"""F-TIS: no negative advantages in responses of a distant policy.

    D = Σ_t (w_t − 1 − log w_t),   w_t = π_old(a_t) / π_other(a_t)

over the tokens of a response. Where D is above `loss.max_distance`, tokens with
A < 0 carry no loss: it would only push the policy away from tokens that it is
unlikely to sample. Such responses still count in the baselines. Responses of
the run itself are never masked.

Reference: F-TIS 2026.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm import losses
from jaxrl_llm.learner import choices
from jaxrl_llm.types import Origin


def without_far(
  mask, old_logprobs, behavior_logprobs, advantages, origin, *, max_distance
) -> jax.Array:
  """Masks tokens with A < 0 in other policies' responses with a large D.

  Args:
    mask: bool [B, T].
    old_logprobs: [B, T], under the policy before the update.
    behavior_logprobs: [B, T], under the policy that sampled the tokens.
    advantages: [B, T].
    origin: int [B, T], an `Origin` per token.
    max_distance: largest D at which no token of a response is masked.
  """
  distance = losses.kl_k3(behavior_logprobs, old_logprobs)
  distance = jnp.sum(jnp.where(mask, distance, 0.0), axis=1, keepdims=True)
  far = (distance > max_distance) & (origin == int(Origin.OTHER))
  return mask & ~(far & (advantages < 0))


choices.MASKS["max_distance"] = without_far
