"""Log-probabilities and entropies of categorical distributions, in float32."""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.arrays import of_equal_shape

# exp(±20) is about 5e8 and 2e-9: far outside any trust region, but well within
# the range of float32.
LOG_RATIO_LIMIT = 20.0


def logprobs_from_logits(logits: chex.Array, tokens: chex.Array) -> jax.Array:
  """Log-probability of each token, log π(a) = z_a - log Σ_v exp z_v.

  Args:
    logits: [..., V], any float type; cast to float32 first. May contain -inf.
    tokens: int [...], in [0, V). Log-probabilities of padding tokens are
      meaningless; mask them.

  Returns:
    float32 [...].
  """
  _check_logits(logits)
  chex.assert_shape(tokens, logits.shape[:-1])
  chex.assert_type(tokens, int)
  logits = jnp.asarray(logits, jnp.float32)
  tokens = jnp.asarray(tokens)
  chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
  return chosen - jax.nn.logsumexp(logits, axis=-1)


def entropy_from_logits(logits: chex.Array) -> jax.Array:
  """Entropy in nats, H = -Σ_v π(v) log π(v).

  Args:
    logits: [..., V], any float type; cast to float32 first. May contain -inf,
      which contributes 0.

  Returns:
    float32 [...].
  """
  _check_logits(logits)
  logprobs = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32), axis=-1)
  # 0 · log 0 is 0 in the limit, but NaN in floating point.
  possible = jnp.isfinite(logprobs)
  finite = jnp.where(possible, logprobs, 0.0)
  terms = jnp.where(possible, jnp.exp(finite) * finite, 0.0)
  return -jnp.sum(terms, axis=-1)


@of_equal_shape("logprobs", "reference_logprobs")
def clamped_log_ratio(
  logprobs: chex.Array, reference_logprobs: chex.Array
) -> jax.Array:
  """log(π / π_ref) per token, clamped to [-20, 20] so that exp stays finite.

  The gradient is 0 where the ratio is clamped.

  Args:
    logprobs: current log-probabilities, any shape.
    reference_logprobs: log-probabilities of the other policy, same shape.

  Returns:
    float32, same shape.
  """
  difference = jnp.asarray(logprobs, jnp.float32) - jnp.asarray(
    reference_logprobs, jnp.float32
  )
  return jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _check_logits(logits: chex.Array) -> None:
  chex.assert_type(logits, float)
  chex.assert_axis_dimension_gt(logits, -1, 0)
