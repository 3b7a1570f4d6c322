"""Corrections for off-policy tokens.

There are three policies: π is trained, π_prox is the centre of its trust region
(the weights before the update), and π_behav sampled the tokens. The clipped
surrogate limits π / π_prox; the weights in this file correct for
π_prox / π_behav.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import distributions, masked
from jaxrl_llm.arrays import of_equal_shape
from jaxrl_llm.errors import check_choice, check_number
from jaxrl_llm.losses.policy import ClippedPolicyLoss, clipped_policy_loss


class Correction(NamedTuple):
  """Importance weights of tokens, as constant factors of a per-token loss."""

  weights: jax.Array  # float32 [..., T], 0 where keep is False.
  keep: jax.Array  # bool [..., T], unmasked tokens that were not rejected.


def truncated_importance(
  proximal_logprobs: chex.Array,
  behavior_logprobs: chex.Array,
  mask: chex.Array,
  *,
  level: str,
  high: chex.Numeric,
  low: chex.Numeric = 0.0,
) -> Correction:
  """Truncated importance sampling (TIS), w = clip(π_prox / π_behav, low, high).

  Truncation bounds the variance at the price of a bias towards π_behav. Do not
  combine it with π_behav as the old policy of the surrogate, whose ratio is
  then an off-policy correction already.

  Args:
    proximal_logprobs: [..., T], under the trainer's policy at the start of the
      update.
    behavior_logprobs: [..., T], under the distribution sampled from.
    mask: [..., T], True at response tokens. A row is one response.
    level: 'token', the ratio of each token; 'sequence', the product over the
      response; 'geometric', its geometric mean.
    high: largest weight, at least 1; usually 2 for tokens, up to 10 for
      sequences.
    low: smallest weight, in [0, 1].

  Returns:
    A `Correction` that keeps every unmasked token. Log-ratios are first clamped
    to [-20, 20].

  Raises:
    ValueError: for an unknown level or bounds outside their range.

  Reference: Ionides 2008, "Truncated importance sampling"; Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training".

  Example:
    >>> proximal = jnp.log(jnp.array([[0.5, 0.9]]))
    >>> behavior = jnp.log(jnp.array([[0.5, 0.3]]))
    >>> mask = jnp.ones((1, 2), bool)
    >>> out = truncated_importance(
    ...   proximal, behavior, mask, level="token", high=2
    ... )
    >>> print(out.weights)
    [[1. 2.]]
  """
  ratio, mask = _importance(
    proximal_logprobs, behavior_logprobs, mask, level, high, low
  )
  weights = jnp.clip(ratio, low, high)
  return Correction(weights=jnp.where(mask, weights, 0.0), keep=mask)


def masked_importance(
  proximal_logprobs: chex.Array,
  behavior_logprobs: chex.Array,
  mask: chex.Array,
  *,
  level: str,
  high: chex.Numeric,
  low: chex.Numeric = 0.0,
) -> Correction:
  """Masked importance sampling: π_prox / π_behav within [low, high], else 0.

  At token level this is IcePop, at sequence level MIS. Tokens outside the
  interval are rejected, not truncated. The reduction weights are those of all
  tokens, so a rejected token still counts in the denominator.

  Args:
    proximal_logprobs: [..., T], as in `truncated_importance`.
    behavior_logprobs: [..., T], as in `truncated_importance`.
    mask: [..., T], as in `truncated_importance`.
    level: as in `truncated_importance`.
    high: largest ratio that is kept, at least 1.
    low: smallest ratio that is kept, in [0, 1].

  Returns:
    A `Correction`; keep is False where a token or its response was rejected.

  Raises:
    ValueError: for an unknown level or bounds outside their range.

  Reference: Ling Team 2025 (IcePop), arXiv:2510.18855.

  Example:
    >>> proximal = jnp.log(jnp.array([[0.5, 0.9]]))
    >>> behavior = jnp.log(jnp.array([[0.5, 0.3]]))
    >>> mask = jnp.ones((1, 2), bool)
    >>> out = masked_importance(proximal, behavior, mask, level="token", high=2)
    >>> print(out.weights, out.keep)
    [[1. 0.]] [[ True False]]
  """
  ratio, mask = _importance(
    proximal_logprobs, behavior_logprobs, mask, level, high, low
  )
  keep = mask & (ratio >= low) & (ratio <= high)
  return Correction(weights=jnp.where(keep, ratio, 0.0), keep=keep)


@of_equal_shape("logprobs", "behavior_logprobs")
def decoupled_policy_loss(
  logprobs: chex.Array,
  proximal_logprobs: chex.Array,
  behavior_logprobs: chex.Array,
  advantages: chex.Array,
  *,
  clip_low: chex.Numeric,
  clip_high: chex.Numeric,
  dual_clip: chex.Numeric | None = None,
  cap: chex.Numeric | None = None,
  floor: chex.Numeric = 0.0,
) -> ClippedPolicyLoss:
  """Decoupled PPO objective: clips around π_prox, corrects for π_behav.

    L = -sg[w] min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    w = clip(π_prox / π_behav, floor, cap),   r = π / π_prox

  π_prox = π_behav gives exactly PPO, bit for bit. Infinite bounds give the
  plain importance-weighted gradient, in which π_prox cancels.

  Args:
    logprobs: [...], under the current policy.
    proximal_logprobs: [...], under π_prox, constant during the update.
    behavior_logprobs: [...], under π_behav, recorded with each token by the
      version of the policy that sampled it.
    advantages: [...], as in `clipped_policy_loss`.
    clip_low: as in `clipped_policy_loss`, relative to π_prox.
    clip_high: as clip_low.
    dual_clip: as clip_low.
    cap: largest weight, at least 1; a number or an array that broadcasts.
      None sets no bound.
    floor: smallest weight, in [0, 1]; a number or an array that broadcasts.

  Returns:
    A `ClippedPolicyLoss` with the ratio π / π_prox.

  Raises:
    ValueError: if a bound is outside its range.

  Reference: Hilton et al. 2022, arXiv:2110.00641; Fu et al. 2025 (AReaL),
    arXiv:2505.24298.

  Example:
    >>> new, proximal, behavior = jnp.log(jnp.array([[0.6], [0.5], [0.25]]))
    >>> out = decoupled_policy_loss(
    ...   new, proximal, behavior, jnp.ones(1), clip_low=0.2, clip_high=0.28
    ... )
    >>> print(out.ratio, out.loss)  # The loss is twice -1.2.
    [1.2] [-2.4]
  """
  check_number("cap", cap, "[1, inf]")
  check_number("floor", floor, "[0, 1]")
  surrogate = clipped_policy_loss(
    logprobs,
    proximal_logprobs,
    advantages,
    clip_low=clip_low,
    clip_high=clip_high,
    dual_clip=dual_clip,
  )
  weight = jnp.exp(
    distributions.clamped_log_ratio(proximal_logprobs, behavior_logprobs)
  )
  weight = jnp.clip(
    weight,
    jnp.broadcast_to(floor, weight.shape),
    jnp.broadcast_to(jnp.inf if cap is None else cap, weight.shape),
  )
  loss = jax.lax.stop_gradient(weight) * surrogate.loss
  return surrogate._replace(loss=loss)


def interpolation_share(
  behavior_version: chex.Array,
  *,
  proximal_version: chex.Numeric,
  current_version: chex.Numeric,
) -> jax.Array:
  """Weight a of the current policy in A-3PO's interpolated proximal policy.

    log π_prox ≈ (1 - a) log π_behav + a log π
    a = (v_prox - v_behav) / (v - v_behav)

  This gives proximal log-probabilities without a forward pass; `mixed_logprobs`
  computes the first line.

  Args:
    behavior_version: int [...], the policy version that sampled each token.
    proximal_version: version at the start of the update.
    current_version: version of the policy being trained.

  Returns:
    float32 [...], clamped to [0, 1]; 0 at tokens that the current version
    sampled.

  Reference: A-3PO 2025, arXiv:2512.06547.

  Example:
    >>> wrote = jnp.array([3, 5])  # Policy version that sampled each token.
    >>> print(interpolation_share(wrote, proximal_version=5, current_version=7))
    [0.5 0. ]
  """
  behavior_version = jnp.asarray(behavior_version)
  span = (current_version - behavior_version).astype(jnp.float32)
  step = (proximal_version - behavior_version).astype(jnp.float32)
  return jnp.clip(step / jnp.maximum(span, 1.0), 0.0, 1.0)


@of_equal_shape("logprobs", "behavior_logprobs", "share")
def mixed_logprobs(
  logprobs: chex.Array, behavior_logprobs: chex.Array, share: chex.Array
) -> jax.Array:
  """Interpolated log-probabilities, (1 - a) log π_behav + a log π.

  Args:
    logprobs: [..., T], under the current policy.
    behavior_logprobs: [..., T], recorded with each token.
    share: [..., T], a in [0, 1].

  Returns:
    float32 [..., T], without a gradient.

  Example:
    >>> new, behavior = jnp.array([-1.0, -1.0]), jnp.array([-2.0, -2.0])
    >>> print(mixed_logprobs(new, behavior, jnp.array([0.25, 1.0])))
    [-1.75 -1.  ]
  """
  behavior = jnp.asarray(behavior_logprobs, jnp.float32)
  current = jnp.asarray(logprobs, jnp.float32)
  # Exact at both ends, unlike behavior + share * (current - behavior).
  return jax.lax.stop_gradient((1.0 - share) * behavior + share * current)


def effective_sample_ratio(weights: chex.Array, mask: chex.Array) -> jax.Array:
  """Effective sample ratio of importance weights, ρ = (Σ w)² / (n Σ w²).

  1 for equal weights, 1/n if a single weight is nonzero. VCPO scales the step
  of an adaptive optimizer by √ρ. On several devices, compute it from global
  sums: a mean of per-device ratios is wrong.

  Args:
    weights: any shape, at least 0, not truncated; one per response for VCPO.
    mask: same shape, True where a sample exists.

  Returns:
    float32 scalar in [0, 1]; 1 without samples, 0 if all weights are 0.

  Reference: Kong 1992, "A note on importance sampling using standardized
    weights"; Huang et al. 2026 (VCPO), arXiv:2602.17616.

  Example:
    >>> mask = jnp.ones(4, bool)
    >>> print(effective_sample_ratio(jnp.ones(4), mask))
    1.0
    >>> print(effective_sample_ratio(jnp.array([1.0, 0.0, 0.0, 0.0]), mask))
    0.25
  """
  weights = masked.masked_fill(weights, mask)
  # Only proportions matter; squares of unscaled weights may overflow.
  largest = masked.masked_max(weights, mask)
  weights = weights / jnp.where(largest > 0.0, largest, 1.0)
  count = masked.masked_count(mask)
  squares = count * jnp.sum(jnp.square(weights))
  ratio = jnp.square(jnp.sum(weights)) / jnp.where(squares > 0.0, squares, 1.0)
  return jnp.where(count > 0, ratio, 1.0)


def ewma_update(
  average: chex.ArrayTree,
  weight: chex.Numeric,
  params: chex.ArrayTree,
  *,
  decay: chex.Numeric,
) -> tuple[chex.ArrayTree, jax.Array]:
  """Updates PPO-EWMA's proximal weights, a bias-corrected moving average.

    W' = β W + 1,   θ_prox' = (β W θ_prox + θ) / W'

  Call it after every policy update, starting from θ_prox = θ and W = 1. The
  average's centre of mass is 1/(1 - β) - 1 steps back; β = 0 gives θ itself.

  Args:
    average: tree of θ_prox.
    weight: W, a scalar.
    params: tree of θ, of the same structure and shapes.
    decay: β, in [0, 1].

  Returns:
    The new average, each leaf in its own dtype, and the new W, float32.

  Raises:
    ValueError: if decay is outside [0, 1].

  Reference: Hilton et al. 2022 (PPO-EWMA), arXiv:2110.00641.

  Example:
    >>> average, weight = {"w": jnp.array([0.0])}, 1.0
    >>> params = {"w": jnp.array([1.0])}
    >>> average, weight = ewma_update(average, weight, params, decay=1.0)
    >>> print(average["w"], weight)
    [0.5] 2.0
  """
  chex.assert_trees_all_equal_shapes(average, params)
  check_number("decay", decay, "[0, 1]")
  kept = decay * jnp.asarray(weight, jnp.float32)
  total = kept + 1.0

  def step(old: jax.Array, new: jax.Array):
    mixed = (kept / total) * old + (1.0 / total) * new
    return mixed.astype(jnp.result_type(old))

  return jax.tree.map(step, average, params), total


# (log-ratio with 0 in masked slots, mask) -> log-weight, [..., T]
# or [..., 1].
LEVELS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
  "token": lambda log_ratio, mask: log_ratio,
  "sequence": functools.partial(masked.masked_sum, axis=-1, keepdims=True),
  "geometric": functools.partial(masked.masked_mean, axis=-1, keepdims=True),
}


@of_equal_shape("proximal_logprobs", "behavior_logprobs", "mask")
def _importance(
  proximal_logprobs: chex.Array,
  behavior_logprobs: chex.Array,
  mask: chex.Array,
  level: str,
  high: chex.Numeric,
  low: chex.Numeric,
) -> tuple[jax.Array, jax.Array]:
  """Returns π_prox / π_behav at the given level, [..., T], and a bool mask."""
  check_choice("level", level, LEVELS)
  check_number("low", low, "[0, 1]")
  check_number("high", high, "[1, inf]")
  mask = jnp.asarray(mask, bool)
  log_ratio = masked.masked_fill(proximal_logprobs, mask)
  log_ratio -= masked.masked_fill(behavior_logprobs, mask)
  log_ratio = LEVELS[level](log_ratio, mask)
  limit = distributions.LOG_RATIO_LIMIT
  log_ratio = jnp.clip(log_ratio, -limit, limit)
  return jnp.broadcast_to(jnp.exp(log_ratio), mask.shape), mask
