"""Functions around an estimator: shape rewards, lambdas and advantages."""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import masked
from jaxrl_llm.arrays import of_equal_shape
from jaxrl_llm.errors import check_number


def soft_overlong_punishment(
  lengths: chex.Array, *, max_length: int, buffer: int, factor: float = 1.0
) -> jax.Array:
  """DAPO's soft overlong punishment, to be added to the outcome reward.

    R(l) = 0                               l ≤ L_max - L_buffer
         = ((L_max - L_buffer) - l) / L_buffer   up to l = L_max
         = -1                              beyond

  times the factor. Dynamic sampling must use correctness without this penalty:
  groups that differ only in length are not worth training on.

  Args:
    lengths: int [...], response tokens, including the stop token.
    max_length: L_max, the generation limit, in tokens.
    buffer: L_buffer, tokens before the limit over which the penalty grows,
      in [1, max_length].
    factor: the largest penalty, at least 0.

  Returns:
    float32 [...], in [-factor, 0].

  Raises:
    ValueError: if a setting is outside its range.

  Reference: Yu et al. 2025 (DAPO), arXiv:2503.14476, equation 13.

  Example:
    >>> lengths = jnp.array([85, 90, 100])
    >>> print(soft_overlong_punishment(lengths, max_length=100, buffer=20))
    [-0.25 -0.5  -1.  ]
  """
  check_number("buffer", buffer, f"[1, {max_length}]")
  check_number("factor", factor, "[0, inf]")
  above = jnp.asarray(lengths, jnp.float32) - (max_length - buffer)
  return -factor * jnp.clip(above / buffer, 0.0, 1.0)


@of_equal_shape("token_rewards", "logprobs", "ref_logprobs", "mask")
def penalize_kl(
  token_rewards: chex.Array,
  logprobs: chex.Array,
  ref_logprobs: chex.Array,
  mask: chex.Array,
  *,
  coefficient: chex.Numeric,
) -> jax.Array:
  """Subtracts a per-token KL penalty, r_t - β (log π - log π_ref).

  The penalty is the k1 estimate: in the reward, k1 gives the gradient of
  KL(π ‖ π_ref), and k3 does not.

  Args:
    token_rewards: [..., T].
    logprobs: [..., T], under the policy that is penalized, usually the policy
      at the start of the update; data, not differentiated.
    ref_logprobs: [..., T], under the reference.
    mask: [..., T], True at response tokens.
    coefficient: β, at least 0.

  Returns:
    float32 [..., T]; 0 in masked slots.

  Raises:
    ValueError: if the coefficient is negative.

  Reference: Ziegler et al. 2019, arXiv:1909.08593, equation 2; Schulman 2020,
    "Approximating KL divergence".

  Example:
    >>> rewards, mask = jnp.array([0.0, 1.0]), jnp.array([True, True])
    >>> new, ref = jnp.array([-1.0, -0.5]), jnp.array([-1.5, -0.5])
    >>> print(penalize_kl(rewards, new, ref, mask, coefficient=0.1))
    [-0.05  1.  ]
  """
  check_number("coefficient", coefficient, "[0, inf]")
  k1 = masked.masked_fill(logprobs, mask) - masked.masked_fill(
    ref_logprobs, mask
  )
  return masked.masked_fill(token_rewards, mask) - coefficient * k1


def length_adaptive_lambda(
  lengths: chex.Array, *, alpha: chex.Numeric
) -> jax.Array:
  """VAPO's length-adaptive lambda of the policy, λ(l) = max(0, 1 - 1/(α l)).

  With it, the weights of GAE sum to Σ λᵗ ≈ 1/(1 - λ) = α l, so that the horizon
  is the same fraction α of every response. For l ≤ 1/α the paper's formula
  gives λ ≤ 0, a case it does not discuss; λ is clamped to 0 here. With α = 0.05
  lambda exceeds 0.95 only above 400 tokens: choose a larger α for short
  responses.

  Args:
    lengths: int or float [...], response tokens, including the stop token.
    alpha: horizon as a fraction of the response, positive.

  Returns:
    float32 [...], in [0, 1); 0 for an empty response.

  Raises:
    ValueError: if alpha is not positive.

  Reference: Yue et al. 2025 (VAPO), arXiv:2504.05118, equations 4 and 5.

  Example:
    >>> lengths = jnp.array([20, 400, 4000])
    >>> print(length_adaptive_lambda(lengths, alpha=0.05))
    [0.    0.95  0.995]
  """
  check_number("alpha", alpha, "(0, inf]")
  horizon = jnp.asarray(lengths, jnp.float32) * alpha
  # Below one token the formula is negative, and at 0 it divides by zero.
  return 1.0 - 1.0 / jnp.maximum(horizon, 1.0)


@of_equal_shape("advantages", "mask")
def whiten(
  advantages: chex.Array,
  mask: chex.Array,
  *,
  center: bool = True,
  epsilon: float = 1e-8,
) -> jax.Array:
  """Whitens advantages over all tokens of the batch, (A - Ā) / √(var A + ε).

  Every token counts once, so long responses have more weight, and the variance
  has Bessel's correction. If all advantages are equal, the divisor is 1.
  Estimators do not whiten: call this on the global batch, after the value
  targets are computed.

  REINFORCE++ is this function applied to the reward-to-go, which is
  `lambda_returns` with values of 0 and γ = λ = 1; for its variant with a
  baseline, first center the rewards of each group with
  `group_relative(..., scale='none')`.

  Args:
    advantages: [..., T].
    mask: [..., T], True at the tokens that count.
    center: False only divides by the scale and does not subtract the mean.
      Signs and zeros are then preserved: required for `egae`, where the last
      token of a cut response must have no gradient.
    epsilon: added to the variance, at least 0.

  Returns:
    float32 [..., T]; 0 in masked slots.

  Raises:
    ValueError: if epsilon is negative.

  Reference: Hu et al. 2025 (REINFORCE++), arXiv:2501.03262.

  Example:
    >>> advantages = jnp.array([[1.0, 2.0], [3.0, 0.0]])
    >>> mask = jnp.array([[True, True], [True, False]])
    >>> print(whiten(advantages, mask))
    [[-1.  0.]
     [ 1.  0.]]
  """
  check_number("epsilon", epsilon, "[0, inf]")
  scale = jnp.sqrt(masked.masked_var(advantages, mask) + epsilon)
  largest = masked.masked_max(advantages, mask)
  varies = largest > -masked.masked_max(-advantages, mask)
  scale = jnp.where(varies, scale, 1.0)
  advantages = masked.masked_fill(advantages, mask)
  if center:
    advantages = advantages - masked.masked_mean(advantages, mask)
  return masked.masked_fill(advantages / scale, mask)
