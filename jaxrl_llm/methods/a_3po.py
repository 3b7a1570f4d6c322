"""A-3PO: a proximal policy that costs no forward pass.

    log π_prox ≈ (1 - a) log π_behav + a log π
    a = (v_prox - v_behav) / (v - v_behav)      for versions v

Differs from decoupled PPO (AReaL), which scores every batch with the policy at
the start of the update: here the log-probs of that policy are interpolated
between the policy that sampled a token and the current one, according to the
three versions.

Reference: A-3PO 2025, arXiv:2512.06547.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import losses
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Algorithm, Part, Settings, core, part


def interpolation_share(
  version: Array, policy_mask: Array, update_version: Array
) -> Array:
  """Weight of the current policy in each token's proximal policy, [B, T].

  The proximal policy is the policy at the start of the update, even if it
  sampled none of the tokens; the policy being trained counts as the next
  version.
  """
  share = losses.interpolation_share(
    version, proximal_version=update_version, current_version=update_version + 1
  )
  return jnp.where(policy_mask, share, 0.0)


def make_loss(settings: Mapping[str, Any]) -> Part:
  """Returns PPO's surrogate around π_prox, weighted by π_prox / π_behav."""
  decoupled = part(losses.decoupled_policy_loss, settings).fn

  def loss(
    logprobs: Array,
    behavior_logprobs: Array,
    advantages: Array,
    interpolation_share: Array,
  ):
    proximal_logprobs = losses.mixed_logprobs(
      logprobs, behavior_logprobs, interpolation_share
    )
    return decoupled(logprobs, proximal_logprobs, behavior_logprobs, advantages)

  return part(loss)


def a_3po(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Takes the ratio against an interpolated proximal policy."""
  kind, high = core.correction_of(s)
  bounds = {"cap": None, "floor": 0.0}
  if kind != "none":
    bounds = {"cap": high, "floor": s.off_policy.low}
  if (kind, s.off_policy.level) != ("truncate", "token") and kind != "none":
    raise InputError(
      "'a_3po' supports off_policy.correction='none', or 'truncate' with"
      " level='token'"
    )
  if s.off_policy.proximal != "recompute":
    raise InputError(
      "'a_3po' has a proximal policy of its own; use"
      " off_policy.proximal='recompute'"
    )
  loss = make_loss({**s.loss, **bounds})

  def check(final: Algorithm) -> None:
    if s.loss.name != "clip" or final.policy_loss is not loss:
      raise InputError("'a_3po' is defined for loss.name='clip' only")

  return algorithm.change(
    policy_loss=loss,
    corrections={},
    proximal="behavior_logprobs",
    inputs={"interpolation_share": part(interpolation_share)},
    checks=(check,),
  )
