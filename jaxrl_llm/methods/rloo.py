"""RLOO: REINFORCE with the mean of the other responses as baseline.

    L = -A_i log π,   A_i = R_i - 1/(G-1) Σ_{j≠i} R_j

Differs from PPO's loss in that there is no ratio and no clip: with the mode
'seq-mean-token-sum', a complete response is one action. The advantages come
from the estimator 'group' with the center 'leave_one_out' and no scale.

Reference: Ahmadian et al. 2024, arXiv:2402.14740; Williams 1992.
"""

from jaxrl_llm import losses
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Algorithm, Settings, part


def rloo(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Uses the policy gradient itself as the loss."""
  if s.off_policy.proximal == "stored":
    raise InputError(
      "this loss has no ratio and needs no proximal policy; use"
      " off_policy.proximal='recompute'"
    )
  fn = losses.policy_gradient_loss
  loss = part(fn, s.loss, old_logprobs="proximal_logprobs")
  return algorithm.change(policy_loss=loss)
