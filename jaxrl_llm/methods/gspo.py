"""GSPO: group sequence policy optimisation.

    s_i = exp(1/|o_i| Σ_t log(π / π_old))
    L = -min(s_{i,t} A, clip(s_{i,t}, 1 - clip_low, 1 + clip_high) A)

Differs from PPO's loss in the ratio: a response has a single ratio, the
geometric mean over its tokens, so that it is clipped as a whole. The bounds are
about a thousandth of PPO's.

Reference: Zheng et al. 2025, arXiv:2507.18071, equations 5 to 7, 13 and 14.
"""

from jaxrl_llm import losses
from jaxrl_llm.learner import Algorithm, Settings, part


def gspo(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Takes one ratio per response."""
  loss = part(losses.gspo_loss, s.loss, old_logprobs="proximal_logprobs")
  return algorithm.change(policy_loss=loss)
