"""F-TIS: no negative advantages in responses of a distant policy.

    D = Σ_t (w_t − 1 − log w_t),   w_t = π_old(a_t) / π_other(a_t)

over the tokens of a response. Where D is above `max_distance`, tokens with
A < 0 carry no loss: it would only push the policy away from tokens that it is
unlikely to sample. Such responses still count in the baselines. Responses of
the run itself are never masked.

Reference: F-TIS 2026.
"""

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import losses
from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.learner import Algorithm, Settings, part
from jaxrl_llm.types import Origin


def without_far(
  mask: Array,
  old_logprobs: Array,
  behavior_logprobs: Array,
  advantages: Array,
  origin: Array,
  *,
  max_distance: float,
) -> Array:
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


def f_tis(
  algorithm: Algorithm, s: Settings, *, max_distance: float = 5.0
) -> Algorithm:
  """Masks tokens with negative advantages in distant responses of others.

  Args:
    algorithm: any algorithm.
    s: settings of the run.
    max_distance: Distance from the policy, summed over the tokens of a
      response, above which it is masked.
  """
  check_number("max_distance", max_distance, "(0, inf)")
  if s.estimator.normalize != "none":
    raise InputError(
      "the normalized advantages would depend on a mask that depends on them;"
      " use estimator.normalize='none'"
    )
  mask = part(without_far, {"max_distance": max_distance})
  return algorithm.change(masks=(mask,))
