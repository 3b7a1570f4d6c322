"""A-3PO: a proximal policy that costs no forward pass.

    log π_prox ≈ (1 - a) log π_behav + a log π
    a = (v_prox - v_behav) / (v - v_behav)      for versions v

Differs from decoupled PPO (AReaL), which scores every batch with the policy at
the start of the update: here the log-probs of that policy are interpolated
between the policy that sampled a token and the current one, according to the
three versions.

Reference: A-3PO 2025, arXiv:2512.06547.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm import losses, register
from jaxrl_llm.learner import choices, parts


def interpolation_share(version, policy_mask, update_version) -> jax.Array:
  """Weight of the current policy in each token's proximal policy, [B, T].

  The proximal policy is the policy at the start of the update, even if it
  sampled none of the tokens; the policy being trained counts as the next
  version.
  """
  share = losses.interpolation_share(
    version, proximal_version=update_version, current_version=update_version + 1
  )
  return jnp.where(policy_mask, share, 0.0)


def make_loss(settings: choices.Settings) -> parts.Part:
  """Returns PPO's surrogate around π_prox, weighted by π_prox / π_behav."""
  decoupled = parts.part(losses.decoupled_policy_loss, settings).fn

  def loss(logprobs, behavior_logprobs, advantages, interpolation_share):
    proximal_logprobs = losses.mixed_logprobs(
      logprobs, behavior_logprobs, interpolation_share
    )
    return decoupled(logprobs, proximal_logprobs, behavior_logprobs, advantages)

  return parts.part(loss)


register.token_input("interpolation_share", interpolation_share)
choices.PROXIMAL_LOSSES["interpolate"] = make_loss
