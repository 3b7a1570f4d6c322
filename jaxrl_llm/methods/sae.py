"""SAE: uses the critic only at the ends of segments.

    A_t = δ_t + γ λ_t A_{t+1},   λ_t = λ where π_behav(a_t) < p, else 1

Differs from GAE in λ: inside a segment the values cancel. A segment ends with a
token that was unlikely under the sampler, where the next value is most likely
to carry new information. That an unlikely token ends its segment, rather than
beginning the next one, is our interpretation.

Reference: Gong et al. 2026 (segmental advantage estimation), arXiv:2601.07320.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import check_number
from jaxrl_llm.learner import Algorithm, Settings, part


def segment_lambda(
  behavior_logprobs: jax.Array,
  *,
  lambda_policy: float,
  segment_probability: float,
) -> jax.Array:
  """λ of each token, [B, T]: lambda_policy at the ends of segments, else 1."""
  ends = behavior_logprobs < jnp.log(segment_probability)
  return jnp.where(ends, lambda_policy, 1.0)


def sae(
  algorithm: Algorithm, s: Settings, *, segment_probability: float = 0.2
) -> Algorithm:
  """Uses `estimator.lambda_policy` at the ends of segments, and 1 elsewhere.

  Args:
    algorithm: an algorithm with a critic.
    s: settings of the run.
    segment_probability: Tokens below this probability under the sampler end a
      segment.
  """
  check_number("segment_probability", segment_probability, "(0, 1]")
  own = {"segment_probability": segment_probability}
  rule = part(segment_lambda, {**s.estimator, **own})
  return algorithm.change(inputs={"policy_lambda": rule})
