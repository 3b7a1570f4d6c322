"""VCPO: stale responses with less variance.

    A_i = R_i - b_i,   b_i = Σ_{j≠i} w_j² g_j² R_j / Σ_{j≠i} w_j² g_j²
    step *= min(1, √(ρ / reference)),   ρ = (Σ w)² / (n Σ w²)

w is the importance weight of a whole response and g the norm of its gradient.
Differs from RLOO in the baseline, which has the least variance off policy, and
in the step, which shrinks when few responses carry the weight. The baseline
leaves out the response itself, which the authors' code includes.

Reference: Huang et al. 2026, arXiv:2602.17616.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm import estimators, losses, register
from jaxrl_llm.learner import choices, estimates, parts

# `estimator.gradient_norms` -> input that gives ‖∇ log π‖² of each response up
# to a constant factor. Tokens with orthogonal gradients of equal norm would
# make it the length.
SQUARED_NORMS = {"length": "own_lengths", "exact": "squared_gradient_norms"}


def sequence_weights(old_logprobs, behavior_logprobs, mask) -> jax.Array:
  """Returns π_old / π_behaviour of whole responses, [B], not truncated."""
  log_ratio = jnp.where(mask, old_logprobs - behavior_logprobs, 0.0)
  return jnp.exp(jnp.clip(jnp.sum(log_ratio, axis=1), -20.0, 20.0))


def optimal_baseline(
  token_rewards, mask, squared_norms, groups, old_logprobs, behavior_logprobs
) -> jax.Array:
  """Rewards minus the baseline of least variance off policy, [B, T].

  The importance weights of the baseline are not truncated, unlike those of the
  loss; any baseline that leaves the response itself out is unbiased.
  """
  rewards = estimates.outcome(token_rewards)
  baseline = estimators.optimal_baseline(
    rewards,
    sequence_weights(old_logprobs, behavior_logprobs, mask),
    squared_norms,
    groups,
    num_groups=groups.shape[0],
  )
  return estimates.per_token(rewards - baseline, mask)


def make_estimator(settings: choices.Settings) -> parts.Part:
  """Returns the part with the chosen norms; exact ones cost a backward pass."""
  norms = SQUARED_NORMS[settings["gradient_norms"]]
  return parts.part(optimal_baseline, settings, squared_norms=norms)


def squared_gradient_norms(gradient_norms) -> jax.Array:
  """Squared norms of the responses' gradients, [B]."""
  return jnp.square(gradient_norms)


def ess_step_scale(
  old_logprobs, behavior_logprobs, policy_mask, *, ess_reference
) -> jax.Array:
  """Factor of a step, min(1, √(effective sample ratio / reference)).

  A mini-batch whose weights leave fewer samples than usual moves less; one
  that leaves more moves no farther than the learning rate says.
  """
  weights = sequence_weights(old_logprobs, behavior_logprobs, policy_mask)
  ratio = losses.effective_sample_ratio(weights, jnp.any(policy_mask, axis=1))
  return jnp.minimum(1.0, jnp.sqrt(ratio / ess_reference))


register.token_input("squared_gradient_norms", squared_gradient_norms)
choices.ESTIMATORS["optimal_baseline"] = make_estimator
choices.STEP_SCALES["ess_scale"] = choices.maker_of(ess_step_scale)
