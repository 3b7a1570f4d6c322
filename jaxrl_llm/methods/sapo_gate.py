"""SAPO's gate: a sigmoid of the ratio instead of PPO's clip.

    L = -(4 / τ) σ(τ (ρ - 1)) A,   τ = tau_pos where A > 0, else tau_neg

Differs from the clip in that a token loses its gradient gradually: the gradient
weight is 1 at a ratio of 1, and decays on either side, faster where A < 0.

This SAPO is Soft Adaptive Policy Optimization. It is unrelated to Swarm
Sampling Policy Optimization (`methods/sapo.py`, arXiv:2509.08721), a system
that shares rollouts between machines.

Reference: Gao et al. 2025, arXiv:2511.20347.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import losses
from jaxrl_llm.errors import check_number
from jaxrl_llm.learner import Algorithm, Settings, part


def sapo_gate_loss(
  logprobs: chex.Array,
  old_logprobs: chex.Array,
  advantages: chex.Array,
  *,
  tau_pos: chex.Numeric = 1.0,
  tau_neg: chex.Numeric = 1.05,
) -> losses.ClippedPolicyLoss:
  """SAPO's soft surrogate.

  Args:
    logprobs: [...], log-probabilities under the current policy.
    old_logprobs: [...], log-probabilities at the start of the update.
    advantages: [...].
    tau_pos: steepness of the gate where A > 0, above 0.
    tau_neg: steepness of the gate at all other tokens, above 0.

  Returns:
    A `losses.ClippedPolicyLoss`. clipped_high and clipped_low mark tokens whose
    ratio has moved in the direction that A favors and that keep less than half
    of PPO's gradient.
  """
  plain = losses.policy_gradient_loss(logprobs, old_logprobs, advantages)
  tau = jnp.where(advantages > 0, tau_pos, tau_neg)
  gate = jax.nn.sigmoid(tau * (plain.ratio - 1.0))
  closed = 4.0 * gate * (1.0 - gate) < 0.5
  return plain._replace(
    loss=-4.0 / tau * gate * advantages,
    clipped_high=closed & (advantages > 0) & (plain.log_ratio > 0),
    clipped_low=closed & (advantages < 0) & (plain.log_ratio < 0),
  )


def sapo_gate(
  algorithm: Algorithm,
  s: Settings,
  *,
  tau_pos: float = 1.0,
  tau_neg: float = 1.05,
) -> Algorithm:
  """Uses a sigmoid of the ratio instead of the clip.

  Args:
    algorithm: any algorithm.
    s: settings of the run.
    tau_pos: Steepness of the gate where the advantage is positive.
    tau_neg: Steepness of the gate at all other tokens.
  """
  check_number("tau_pos", tau_pos, "(0, inf)")
  check_number("tau_neg", tau_neg, "(0, inf)")
  tau = {"tau_pos": tau_pos, "tau_neg": tau_neg}
  loss = part(sapo_gate_loss, tau, old_logprobs="proximal_logprobs")
  return algorithm.change(policy_loss=loss)
