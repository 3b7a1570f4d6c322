"""A surrogate whose importance ratio belongs to the whole response (GSPO)."""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import masked
from jaxrl_llm.losses.policy import ClippedPolicyLoss, clipped_policy_loss
from jaxrl_llm.losses.regularizers import with_gradient_of

# exp(10) = 22026. A mean over tokens never comes near it unless all is lost.
_LARGEST_MEAN = 10.0


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
  """GSPO in its token form: one ratio per response, a gradient per token.

    s_i = exp(1/|o_i| Σ_t log(π / π_old)),   s_{i,t} = sg[s_i] π / sg[π]
    L = -min(s_{i,t} A, clip(s_{i,t}, 1 - clip_low, 1 + clip_high) A)

  All tokens of a response are clipped together; a share of 15 % is usual, as
  the bounds are narrow (3e-4 and 4e-4 in the paper). With the weights of
  'seq-mean-token-mean' and one advantage per response, value and gradient are
  those of GSPO; advantages per token are allowed.

  Args:
    logprobs: [..., T], log-probabilities under the current policy.
    old_logprobs: [..., T], those at the start of the update.
    advantages: [..., T].
    mask: [..., T], True at response tokens; the mean runs over these.
    segments: int [..., T] in [0, T]: tokens of a row with the same number are
      one response, which is how packed rows hold several. None means that
      every row is one response.
    clip_low: as in `clipped_policy_loss`.
    clip_high: as in `clipped_policy_loss`.

  Returns:
    A `ClippedPolicyLoss`; ratio and log_ratio, at most 10, are those of the
    response. In masked slots the loss is 0, whatever stands there.

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
  chex.assert_equal_shape([logprobs, old_logprobs, advantages, mask])
  logprobs = masked.masked_fill(logprobs, mask)
  mean = _mean_over_sequence(
    logprobs - masked.masked_fill(old_logprobs, mask), mask, segments
  )
  # The gradient is that of the token, and 0 beyond the limit.
  log_ratio = jnp.minimum(with_gradient_of(mean, logprobs), _LARGEST_MEAN)
  return clipped_policy_loss(
    log_ratio,
    jnp.zeros_like(log_ratio),
    masked.masked_fill(advantages, mask),
    clip_low=clip_low,
    clip_high=clip_high,
  )


def _mean_over_sequence(
  x: jax.Array, mask: chex.Array, segments: chex.Array | None
) -> jax.Array:
  """Every token gets the mean over its sequence, [..., T]."""
  if segments is None:
    mean = masked.masked_mean(x, mask, axis=-1, keepdims=True)
    return jnp.broadcast_to(mean, x.shape)
  chex.assert_equal_shape([x, segments])
  length = x.shape[-1]

  def row(x, mask, segments):
    own = jnp.where(mask, segments, -1)
    mean = masked.segment_mean(x, own, num_segments=length + 1)
    return mean[segments]

  rows = (y.reshape(-1, length) for y in map(jnp.asarray, (x, mask, segments)))
  return jax.vmap(row)(*rows).reshape(x.shape)
