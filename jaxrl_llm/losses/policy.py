"""Per-token policy-gradient losses: PPO's clipped surrogate and variants."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import distributions, masked
from jaxrl_llm.arrays import of_equal_shape
from jaxrl_llm.errors import check_number
from jaxrl_llm.losses.regularizers import with_gradient_of

# Upper bound of a response's mean log-ratio: exp(10) = 22026, far above any
# ratio in a healthy run.
_LARGEST_MEAN = 10.0


class ClippedPolicyLoss(NamedTuple):
  """Per-token loss with its ratio and clip flags, all of the same shape.

  Flags are defined as in `clipped_policy_loss` unless a loss states otherwise.
  """

  loss: jax.Array  # float32, to be minimised.
  ratio: jax.Array  # float32, ρ = π/π_old.
  log_ratio: jax.Array  # float32, log ρ, clamped to [-20, 20].
  clipped_high: jax.Array  # bool, A > 0 and ρ > 1 + clip_high: no gradient.
  clipped_low: jax.Array  # bool, A < 0 and ρ < 1 - clip_low: no gradient.
  dual_clipped: jax.Array  # bool, A < 0 and ρ > dual_clip: no gradient.


@of_equal_shape("logprobs", "old_logprobs", "advantages")
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

  In words: the loss is -A times the ratio, without a gradient once the ratio
  has moved far enough in the direction that A favors. Dual clipping also
  removes the gradient when a token with A < 0 has become far *more* likely.

  Args:
    logprobs: [...], log-probabilities under the current policy.
    old_logprobs: [...], log-probabilities at the start of the update.
    advantages: [...]. No gradient is stopped here; the caller decides.
    clip_low: clip range below a ratio of 1, at least 0; infinity disables the
      bound. A number or an array that broadcasts to the shape of logprobs.
    clip_high: clip range above a ratio of 1, as clip_low.
    dual_clip: bound of the ratio where A < 0, above 1; a number or an array as
      clip_low. None disables it, as in the papers of DAPO and VAPO.

  Returns:
    A `ClippedPolicyLoss`. Nothing is reduced; the caller must mask
    padding.

  Raises:
    ValueError: if a bound is outside its range.

  Reference: Schulman et al. 2017 (PPO), arXiv:1707.06347, equation 7; Ye et
    al. 2019 (dual clip), arXiv:1912.09729; Yu et al. 2025 (DAPO),
    arXiv:2503.14476, equation 10.

  Example:
    >>> old = jnp.log(jnp.array([0.5, 0.5, 0.5]))
    >>> new = jnp.log(jnp.array([0.5, 0.6, 0.9]))
    >>> A = jnp.ones(3)
    >>> out = clipped_policy_loss(new, old, A, clip_low=0.2, clip_high=0.28)
    >>> print(out.loss, out.clipped_high)
    [-1.   -1.2  -1.28] [False False  True]
  """
  check_number("clip_low", clip_low, "[0, inf]")
  check_number("clip_high", clip_high, "[0, inf]")
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
    check_number("dual_clip", dual_clip, "(1, inf]")
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


def cispo_loss(
  logprobs: chex.Array,
  old_logprobs: chex.Array,
  advantages: chex.Array,
  *,
  clip_high: chex.Numeric,
  clip_low: chex.Numeric | None = None,
) -> ClippedPolicyLoss:
  """CISPO: REINFORCE with a clipped importance weight; no gradient is dropped.

    L = -sg[clip(ρ, 1 - clip_low, 1 + clip_high)] A log π,  ρ = π / π_old

  A token whose ratio has moved far keeps a bounded weight, for both signs of
  A, where PPO's surrogate would drop its gradient.

  Args:
    logprobs: [...], log-probabilities under the current policy.
    old_logprobs: [...], log-probabilities at the start of the update.
    advantages: [...], as in `clipped_policy_loss`.
    clip_high: the largest weight is 1 + clip_high; at least 0, a number or an
      array that broadcasts. The paper tunes it but does not disclose the value.
    clip_low: the smallest weight is 1 - clip_low; as clip_high. None, as in the
      paper's experiments, sets no lower bound.

  Returns:
    A `ClippedPolicyLoss`. Only its gradient is meaningful, not its value.
    clipped_high and clipped_low mark tokens whose weight is clipped.

  Raises:
    ValueError: if a bound is negative.

  Reference: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, equations 4 and 5.

  Example:
    >>> old, new = jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.9]]))
    >>> A = jnp.ones(2)
    >>> loss = lambda x: cispo_loss(x, old, A, clip_high=0.28).loss.sum()
    >>> print(jax.grad(loss)(new))  # Bounded, and never dropped.
    [-1.   -1.28]
  """
  check_number("clip_high", clip_high, "[0, inf]")
  check_number("clip_low", clip_low, "[0, inf]")
  plain = policy_gradient_loss(logprobs, old_logprobs, advantages)
  ratio = plain.ratio
  highest = jnp.broadcast_to(jnp.float32(1.0) + clip_high, ratio.shape)
  floor = 0.0 if clip_low is None else jnp.float32(1.0) - clip_low
  lowest = jnp.broadcast_to(floor, ratio.shape)
  weight = jax.lax.stop_gradient(jnp.clip(ratio, lowest, highest))
  return plain._replace(
    loss=weight * plain.loss,
    clipped_high=ratio > highest,
    clipped_low=ratio < lowest,
  )


@of_equal_shape("logprobs", "old_logprobs", "advantages")
def policy_gradient_loss(
  logprobs: chex.Array, old_logprobs: chex.Array, advantages: chex.Array
) -> ClippedPolicyLoss:
  """The plain policy gradient of REINFORCE and RLOO, L = -A log π.

  With 'seq-mean-token-sum' weights, a complete response is one action.

  Args:
    logprobs: [...], log-probabilities under the current policy.
    old_logprobs: [...], log-probabilities at the start of the update; only
      reported. Several updates on the same data are not corrected for.
    advantages: [...], as in `clipped_policy_loss`.

  Returns:
    An unclipped `ClippedPolicyLoss`. Only its gradient is meaningful, not its
    value.

  Reference: Williams 1992; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740.

  Example:
    >>> old, A = jnp.zeros(2), jnp.array([1.0, -2.0])
    >>> loss = lambda x: policy_gradient_loss(x, old, A).loss.sum()
    >>> print(jax.grad(loss)(jnp.array([-0.1, -0.2])))
    [-1.  2.]
  """
  log_ratio = distributions.clamped_log_ratio(logprobs, old_logprobs)
  never = jnp.zeros(log_ratio.shape, bool)
  advantages = jnp.asarray(advantages, jnp.float32)
  loss = -advantages * jnp.asarray(logprobs, jnp.float32)
  ratio = jnp.exp(log_ratio)
  return ClippedPolicyLoss(loss, ratio, log_ratio, never, never, never)


def rejection_policy_loss(
  logprobs: chex.Array,
  old_logprobs: chex.Array,
  advantages: chex.Array,
  rejected: chex.Array,
  *,
  cap: chex.Numeric = jnp.inf,
) -> ClippedPolicyLoss:
  """Importance-weighted policy gradient without the rejected tokens.

    L = -sg[min(ρ, cap)] A log π, and 0 where rejected;  ρ = π / π_old

  The common form of DIS, DPPO and KPop, which differ in `rejected`.
  The reduction weights are those of all tokens, so a rejected token still
  counts in the denominator.

  Args:
    logprobs: [...], log-probabilities under the current policy.
    old_logprobs: [...], log-probabilities under the policy that sampled.
    advantages: [...], as in `clipped_policy_loss`.
    rejected: bool [...], tokens without a gradient.
    cap: largest weight, above 0.

  Returns:
    A `ClippedPolicyLoss`. Only its gradient is meaningful, not its value.
    clipped_high and clipped_low mark rejected tokens that are more and less
    likely, respectively, than under the old policy.

  Raises:
    ValueError: if the cap is not positive.

  Example:
    >>> old, new = jnp.log(jnp.array([[0.5, 0.5], [0.6, 0.9]]))
    >>> A, rejected = jnp.ones(2), jnp.array([False, True])
    >>> loss = lambda x: rejection_policy_loss(x, old, A, rejected).loss.sum()
    >>> print(jax.grad(loss)(new))
    [-1.2  0. ]
  """
  check_number("cap", cap, "(0, inf]")
  plain = policy_gradient_loss(logprobs, old_logprobs, advantages)
  weight = jnp.where(rejected, 0.0, jnp.minimum(plain.ratio, cap))
  return plain._replace(
    loss=jax.lax.stop_gradient(weight) * plain.loss,
    clipped_high=rejected & (plain.log_ratio > 0),
    clipped_low=rejected & (plain.log_ratio < 0),
  )


@of_equal_shape("logprobs", "other_logprobs")
def binary_kl(logprobs: chex.Array, other_logprobs: chex.Array) -> jax.Array:
  """Binary KL(p ‖ q) of "this token or any other", from its log-probs.

    KL = p log(p / q) + (1 - p) log((1 - p) / (1 - q))

  A lower bound of the KL of the full distributions that needs no logits.

  Args:
    logprobs: [...], log p.
    other_logprobs: [...], log q.

  Returns:
    float32 [...], at least 0 up to rounding. Probabilities are clamped to at
    most 1 - 1e-7.

  Example:
    >>> p, q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.5, 0.9]))
    >>> print(binary_kl(p, q))
    [0.        0.5108256]
  """
  p, q = (
    jnp.minimum(jnp.asarray(x, jnp.float32), -1e-7)
    for x in (logprobs, other_logprobs)
  )
  others = jnp.log(jnp.expm1(p) / jnp.expm1(q))
  return jnp.exp(p) * (p - q) - jnp.expm1(p) * others


@of_equal_shape("logprobs", "old_logprobs", "advantages", "mask")
def gspo_loss(
  logprobs: chex.Array,
  old_logprobs: chex.Array,
  advantages: chex.Array,
  mask: chex.Array,
  segments: chex.Array | None = None,
  *,
  clip_low: chex.Numeric,
  clip_high: chex.Numeric,
) -> ClippedPolicyLoss:
  """GSPO in its token form: one ratio per response, one gradient per token.

    s_i = exp(1/|o_i| Σ_t log(π / π_old)),   s_{i,t} = sg[s_i] π / sg[π]
    L = -min(s_{i,t} A, clip(s_{i,t}, 1 - clip_low, 1 + clip_high) A)

  All tokens of a response are clipped together; a clip fraction of 15 % is
  common, as the bounds are narrow (3e-4 and 4e-4 in the paper). With the
  weights of 'seq-mean-token-mean' and one advantage per response, value and
  gradient equal those of GSPO; per-token advantages are allowed.

  Args:
    logprobs: [..., T], log-probabilities under the current policy.
    old_logprobs: [..., T], log-probabilities at the start of the update.
    advantages: [..., T].
    mask: [..., T], True at response tokens; the mean runs over these.
    segments: int [..., T] in [0, T]: tokens of a row with the same number form
      one response, as in packed rows. None means that every row is one
      response.
    clip_low: as in `clipped_policy_loss`.
    clip_high: as in `clipped_policy_loss`.

  Returns:
    A `ClippedPolicyLoss`; ratio and log_ratio (at most 10) are those of the
    response. In masked slots the loss is 0.

  Raises:
    ValueError: if a bound is negative.

  Reference: Zheng et al. 2025 (GSPO), arXiv:2507.18071, equations 5 to 7 and
    13 to 14.

  Example:
    >>> old = jnp.zeros((1, 4))
    >>> new = jnp.array([[0.2, 0.0, 0.0, 0.0]])  # One token of four has moved.
    >>> A, mask = jnp.ones((1, 4)), jnp.ones((1, 4), bool)
    >>> out = gspo_loss(new, old, A, mask, clip_low=0.03, clip_high=0.04)
    >>> print(out.clipped_high)  # Together, as the mean moved by 0.05.
    [[ True  True  True  True]]
  """
  logprobs = masked.masked_fill(logprobs, mask)
  mean = mean_over_sequence(
    logprobs - masked.masked_fill(old_logprobs, mask), mask, segments
  )
  # The gradient is that of the token's own log-prob, and 0 beyond the limit.
  log_ratio = jnp.minimum(with_gradient_of(mean, logprobs), _LARGEST_MEAN)
  return clipped_policy_loss(
    log_ratio,
    jnp.zeros_like(log_ratio),
    masked.masked_fill(advantages, mask),
    clip_low=clip_low,
    clip_high=clip_high,
  )


@of_equal_shape("x", "segments")
def mean_over_sequence(
  x: chex.Array, mask: chex.Array, segments: chex.Array | None = None
) -> jax.Array:
  """Returns, for every token, the mean over its response, [..., T].

  Args:
    x: [..., T].
    mask: [..., T], True at response tokens; the mean runs over these.
    segments: as in `gspo_loss`.

  Example:
    >>> x, mask = jnp.array([1.0, 3.0, 5.0]), jnp.ones(3, bool)
    >>> print(mean_over_sequence(x, mask, jnp.array([0, 0, 1])))
    [2. 2. 5.]
  """
  if segments is None:
    mean = masked.masked_mean(x, mask, axis=-1, keepdims=True)
    return jnp.broadcast_to(mean, x.shape)
  length = x.shape[-1]

  def row(x: jax.Array, mask: jax.Array, segments: jax.Array):
    own = jnp.where(mask, segments, -1)
    mean = masked.segment_mean(x, own, num_segments=length + 1)
    return mean[segments]

  rows = (y.reshape(-1, length) for y in map(jnp.asarray, (x, mask, segments)))
  return jax.vmap(row)(*rows).reshape(x.shape)
