"""F-TIS: no negative advantages where another policy is far from this one.

    D = Σ_t (w_t − 1 − log w_t),   w_t = π_old(a_t) / π_other(a_t)

over the tokens of a response. Where D is above `loss.max_distance`, tokens with
A < 0 carry no loss: a policy is not pushed away from what it would hardly
write. Such responses stay in the baselines. Responses of the run itself are
never masked.

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
  """Masks tokens with A < 0 of other policies' responses with D above a bound.

  Args:
    mask: bool [B, T].
    old_logprobs: [B, T], of the policy before the update.
    behavior_logprobs: [B, T], of the policy that wrote the tokens.
    advantages: [B, T].
    origin: int [B, T], an `Origin` per token.
    max_distance: largest D that keeps a response whole.
  """
  distance = losses.kl_k3(behavior_logprobs, old_logprobs)
  distance = jnp.sum(jnp.where(mask, distance, 0.0), axis=1, keepdims=True)
  far = (distance > max_distance) & (origin == int(Origin.OTHER))
  return mask & ~(far & (advantages < 0))


choices.MASKS["max_distance"] = without_far
