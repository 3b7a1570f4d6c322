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

from jaxrl_llm.learner import choices


def segment_lambda(
  behavior_logprobs, *, lambda_policy, segment_probability=0.2
) -> jax.Array:
  """λ of each token, [B, T]: lambda_policy at the ends of segments, else 1."""
  ends = behavior_logprobs < jnp.log(segment_probability)
  return jnp.where(ends, lambda_policy, 1.0)


choices.LAMBDA_RULES["segments"] = choices.maker_of(segment_lambda)
