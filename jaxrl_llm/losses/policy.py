"""The clipped surrogate of PPO and its descendants."""

import numbers
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import distributions


class ClippedPolicyLoss(NamedTuple):
  """Per-token loss and what one wants to know about it. All of one shape."""

  loss: jax.Array  # float32, to be minimised.
  ratio: jax.Array  # float32, ρ = π/π_old.
  log_ratio: jax.Array  # float32, log ρ, clamped to [-20, 20].
  clipped_high: jax.Array  # bool, A > 0 and ρ > 1 + clip_high: no gradient.
  clipped_low: jax.Array  # bool, A < 0 and ρ < 1 - clip_low: no gradient.
  dual_clipped: jax.Array  # bool, A < 0 and ρ > dual_clip: no gradient.


def clipped_policy_loss(
  logprobs: chex.Array,
  old_logprobs: chex.Array,
  advantages: chex.Array,
  *,
  clip_low: chex.Numeric,
  clip_high: chex.Numeric,
  dual_clip: chex.Numeric | None = None,
) -> ClippedPolicyLoss:
  """PPO's clipped surrogate with separate bounds (Clip-Higher of DAPO).

    L = -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A),  ρ = π / π_old
    L = min(L, -dual_clip · A)  where A < 0

  In words: the loss is -A times the ratio, and the ratio stops counting once
  it has moved far enough in the direction that A asks for. Dual clipping also
  stops it when a token with A < 0 has become far *more* likely.

  Args:
    logprobs: [...], log-probabilities under the current policy.
    old_logprobs: [...], those at the start of the update.
    advantages: [...]. No gradient is stopped here; the caller decides.
    clip_low: room below a ratio of 1, at least 0; infinite turns it off. A
      number or an array that broadcasts to the shape of logprobs.
    clip_high: room above a ratio of 1, likewise.
    dual_clip: largest ratio that counts where A < 0, above 1; likewise. None
      turns it off, as in the papers of DAPO and VAPO.

  Returns:
    A `ClippedPolicyLoss`. Nothing is reduced: what stands in padding is the
    caller's to leave out.

  Raises:
    ValueError: if a bound is outside its range.

  Reference: Schulman et al. 2017 (PPO), arXiv:1707.06347, equation 7; Ye et
    al. 2019 (dual clip), arXiv:1912.09729; Yu et al. 2025 (DAPO),
    arXiv:2503.14476, equation 10.
  """
  chex.assert_equal_shape([logprobs, old_logprobs, advantages])
  _check_bound("clip_low", clip_low, 0.0)
  _check_bound("clip_high", clip_high, 0.0)
  advantages = jnp.asarray(advantages, jnp.float32)
  log_ratio = distributions.clamped_log_ratio(logprobs, old_logprobs)
  ratio = jnp.exp(log_ratio)
  highest = jnp.broadcast_to(jnp.float32(1.0) + clip_high, ratio.shape)
  lowest = jnp.broadcast_to(jnp.float32(1.0) - clip_low, ratio.shape)
  clipped_high = (advantages > 0) & (ratio > highest)
  clipped_low = (advantages < 0) & (ratio < lowest)
  counting = jnp.where(clipped_high, highest, ratio)
  counting = jnp.where(clipped_low, lowest, counting)
  dual_clipped = jnp.zeros(ratio.shape, bool)
  if dual_clip is not None:
    _check_bound("dual_clip", dual_clip, 1.0, strict=True)
    most = jnp.broadcast_to(jnp.asarray(dual_clip, jnp.float32), ratio.shape)
    dual_clipped = (advantages < 0) & (ratio > most)
    counting = jnp.where(dual_clipped, most, counting)
  return ClippedPolicyLoss(
    loss=-advantages * counting,
    ratio=ratio,
    log_ratio=log_ratio,
    clipped_high=clipped_high,
    clipped_low=clipped_low,
    dual_clipped=dual_clipped,
  )


def _check_bound(
  name: str, value: chex.Numeric, least: float, *, strict: bool = False
) -> None:
  """Refuses a number outside its range; arrays may be traced and pass."""
  if not isinstance(value, numbers.Real):
    return
  if not (value > least if strict else value >= least):
    relation = "above" if strict else "at least"
    raise ValueError(f"{name}={value}, expected {relation} {least}")
