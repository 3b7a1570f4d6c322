"""HAPO's clip range, advantage and temperature from a token's entropy.

All three depend on one number per token: the entropy code h in [-1, 1], which
is negative where the policy is more certain than at the pivot and positive
where it is less certain. A code of 0 changes nothing. Entropy codes are data:
stop their gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import masked
from jaxrl_llm.arrays import of_equal_shape
from jaxrl_llm.errors import check_choice, check_number

_LEAST_ENTROPY = 1e-8


class EntropyStatistics(NamedTuple):
  """Location and spread of a batch's log-entropies; float32 scalars.

  If all are 0, as for a batch without tokens, every token gets the code 0: a
  neutral start before there are statistics of an earlier batch.
  """

  pivot: jax.Array  # Quantile of log H.
  rms: jax.Array  # Root mean square of log H - pivot.
  high: jax.Array  # Largest (log H - pivot) / rms, at least 0.
  low: jax.Array  # Smallest (log H - pivot) / rms, at most 0.


class ClipBounds(NamedTuple):
  """Clip ranges below and above a ratio of 1, per token; float32."""

  low: jax.Array
  high: jax.Array


@of_equal_shape("entropies", "mask")
def entropy_statistics(
  entropies: chex.Array, mask: chex.Array, *, quantile: float = 0.8
) -> EntropyStatistics:
  """Pivot and spread of the log-entropies of all tokens of a batch.

  The pivot is the nearest-rank quantile, the ⌈q n⌉-th smallest of n tokens, and
  the spread is measured around the pivot, not around the mean.

  Args:
    entropies: [..., T], in nats, of the policy at each token.
    mask: [..., T], True at response tokens.
    quantile: q, in [0, 1].

  Returns:
    An `EntropyStatistics`.

  Raises:
    ValueError: if the quantile is outside [0, 1].

  Reference: HAPO 2025, arXiv:2509.16591.

  Example:
    >>> entropies = jnp.array([[0.01, 0.1, 1.0]])
    >>> mask = jnp.ones((1, 3), bool)
    >>> statistics = entropy_statistics(entropies, mask, quantile=0.5)
    >>> print(f"{jnp.exp(statistics.pivot):.2f}")
    0.10
  """
  check_number("quantile", quantile, "[0, 1]")
  mask = jnp.asarray(mask, bool)
  logs = _log_entropy(entropies, mask)
  ordered = jnp.sort(jnp.where(mask, logs, jnp.inf), axis=None)
  # q n is rounded in floating point; an integer must not round up to the next.
  rank = jnp.ceil((quantile - 1e-6) * masked.masked_count(mask))
  place = jnp.maximum(rank.astype(jnp.int32) - 1, 0)
  pivot = jnp.where(jnp.any(mask), ordered[place], 0.0)
  above = logs - pivot
  rms = jnp.sqrt(masked.masked_mean(jnp.square(above), mask))
  scaled = above / jnp.where(rms > 0.0, rms, 1.0)
  return EntropyStatistics(
    pivot=pivot,
    rms=rms,
    high=masked.masked_max(jnp.maximum(scaled, 0.0), mask),
    low=-masked.masked_max(jnp.maximum(-scaled, 0.0), mask),
  )


@of_equal_shape("entropies", "mask")
def entropy_code(
  entropies: chex.Array,
  mask: chex.Array,
  statistics: EntropyStatistics,
  *,
  sign: str = "intended",
) -> jax.Array:
  """HAPO's entropy code: log-entropy relative to its pivot, in [-1, 1].

    h = (log H - pivot) / rms,   h / high where h > 0,   h / |low| where h < 0

  Args:
    entropies: [..., T], in nats.
    mask: [..., T], True at response tokens.
    statistics: statistics of these or of earlier tokens; beyond their range h
      is clamped to -1 or 1.
    sign: 'intended' as above. 'released' divides by low where h < 0, as the
      authors' code does; low-entropy tokens then get a *positive* code, and the
      rules of HAPO for h < 0 never apply.

  Returns:
    float32 [..., T]; 0 in masked slots.

  Raises:
    ValueError: for an unknown sign.

  Reference: HAPO 2025, arXiv:2509.16591.

  Example:
    >>> entropies = jnp.array([[0.01, 0.1, 1.0]])
    >>> mask = jnp.ones((1, 3), bool)
    >>> statistics = entropy_statistics(entropies, mask, quantile=0.5)
    >>> print(entropy_code(entropies, mask, statistics).round(2))
    [[-1.  0.  1.]]
  """
  check_choice("sign", sign, SIGNS)
  above = _log_entropy(entropies, mask) - statistics.pivot
  highest = statistics.rms * statistics.high
  lowest = statistics.rms * SIGNS[sign](statistics.low)
  divisor = jnp.where(above > 0.0, highest, lowest)
  usable = jnp.asarray(mask, bool) & (divisor != 0.0)
  code = jnp.where(usable, above / jnp.where(usable, divisor, 1.0), 0.0)
  return jnp.clip(code, -1.0, 1.0)


def adaptive_clip(
  code: chex.Array, *, clip_low: chex.Numeric, clip_high: chex.Numeric
) -> ClipBounds:
  """HAPO's asymmetric adaptive clipping.

    high = clip_high (1 + h) where h > 0,   low = clip_low (1 - h) where h < 0

  Probabilities of uncertain tokens may rise further, and those of certain
  tokens may fall further; the other bound is unchanged.

  Args:
    code: [...], the entropy code, in [-1, 1].
    clip_low: clip range below a ratio of 1 where h = 0, at least 0.
    clip_high: clip range above a ratio of 1 where h = 0, at least 0.

  Returns:
    `ClipBounds`, each float32 [...], for `losses.clipped_policy_loss`.

  Raises:
    ValueError: if a bound is negative.

  Reference: HAPO 2025, arXiv:2509.16591.

  Example:
    >>> code = jnp.array([-1.0, 0.0, 1.0])  # Certain, at the pivot, uncertain.
    >>> bounds = adaptive_clip(code, clip_low=0.2, clip_high=0.2)
    >>> print(bounds.low, bounds.high)
    [0.4 0.2 0.2] [0.2 0.2 0.4]
  """
  check_number("clip_low", clip_low, "[0, inf]")
  check_number("clip_high", clip_high, "[0, inf]")
  code = jnp.asarray(code, jnp.float32)
  return ClipBounds(
    low=clip_low * (1.0 - jnp.minimum(code, 0.0)),
    high=clip_high * (1.0 + jnp.maximum(code, 0.0)),
  )


@of_equal_shape("advantages", "code", "ratio")
def redistribute(
  advantages: chex.Array,
  code: chex.Array,
  ratio: chex.Array,
  *,
  clip_low: chex.Numeric,
  clip_high: chex.Numeric,
) -> jax.Array:
  """HAPO's differential advantage redistribution, A (1 + h) at some tokens.

  The advantage of an uncertain token (h > 0) is amplified where its ratio has
  left the neutral zone (1 - clip_low / 2, 1 + clip_high / 2); that of a certain
  token (h < 0) is damped while its ratio is inside. All other tokens keep A.

  Args:
    advantages: [...].
    code: [...], the entropy code, in [-1, 1].
    ratio: [...], π / π_old, without a gradient.
    clip_low: the *adapted* bound of `adaptive_clip`, a number or [...].
    clip_high: as clip_low.

  Returns:
    float32 [...], with the sign of the advantage and at most twice its size.

  Raises:
    ValueError: if a bound is negative.

  Reference: HAPO 2025, arXiv:2509.16591.

  Example:
    >>> code = jnp.array([-1.0, 0.0, 1.0])
    >>> advantages, ratio = jnp.ones(3), jnp.array([1.0, 1.0, 1.5])
    >>> bounds = {"clip_low": 0.2, "clip_high": 0.2}
    >>> print(redistribute(advantages, code, ratio, **bounds))
    [0. 1. 2.]
  """
  check_number("clip_low", clip_low, "[0, inf]")
  check_number("clip_high", clip_high, "[0, inf]")
  advantages = jnp.asarray(advantages, jnp.float32)
  code = jnp.asarray(code, jnp.float32)
  ratio = jnp.asarray(ratio, jnp.float32)
  neutral = (ratio > 1.0 - clip_low / 2) & (ratio < 1.0 + clip_high / 2)
  applies = jnp.where(code > 0.0, ~neutral, neutral)
  return jnp.where(applies, advantages * (1.0 + code), advantages)


def adaptive_temperature(
  code: chex.Array, *, temperature: chex.Numeric, tau: float
) -> jax.Array:
  """HAPO's sampling temperature per token, T (1 + τ h).

  The trainer computes log-probabilities at a single temperature; importance
  weights can correct for the difference of the two distributions.

  Args:
    code: [...], the entropy code of the next token, from the statistics of an
      earlier batch; clamped to [-1, 1].
    temperature: T, a number or [...].
    tau: largest relative change, in [0, 1).

  Returns:
    float32 [...].

  Raises:
    ValueError: if tau is outside [0, 1).

  Reference: HAPO 2025, arXiv:2509.16591.

  Example:
    >>> code = jnp.array([-1.0, 0.0, 1.0])
    >>> print(adaptive_temperature(code, temperature=1.0, tau=0.05))
    [0.95 1.   1.05]
  """
  check_number("tau", tau, "[0, 1)")
  code = jnp.clip(jnp.asarray(code, jnp.float32), -1.0, 1.0)
  return temperature * (1.0 + tau * code)


def _log_entropy(entropies: chex.Array, mask: chex.Array) -> jax.Array:
  """Returns log max(H, 1e-8), and log 1e-8 in masked slots."""
  filled = masked.masked_fill(entropies, mask)
  return jnp.log(jnp.maximum(filled, _LEAST_ENTROPY))


# low (at most 0) -> divisor of h below 0.
SIGNS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "intended": jnp.negative,
  "released": lambda low: low,
}
