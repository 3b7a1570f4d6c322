"""CISPO: clips the importance weight instead of dropping tokens.

    L = -sg[clip(ρ, 1 - clip_low, 1 + clip_high)] A log π,  ρ = π / π_old

Differs from PPO's loss in the gradient of a token whose ratio has moved far: it
is bounded, whereas PPO's is zero. The paper does not state its upper bound and
has no lower bound; here both are settings.

Reference: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, equations 4 and 5.
"""

from jaxrl_llm import losses
from jaxrl_llm.learner import Algorithm, Settings, part


def cispo(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Clips importance weights."""
  loss = part(losses.cispo_loss, s.loss, old_logprobs="proximal_logprobs")
  return algorithm.change(policy_loss=loss)
