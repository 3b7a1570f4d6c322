"""RLOO: REINFORCE with the mean of the other responses as baseline.

    L = -A_i log π,   A_i = R_i - 1/(G-1) Σ_{j≠i} R_j

Differs from PPO's loss in that there is no ratio and no clip: with the mode
'seq-mean-token-sum', a complete response is one action. The advantages come
from the estimator 'group' with the center 'leave_one_out' and no scale.

Reference: Ahmadian et al. 2024, arXiv:2402.14740; Williams 1992.
"""

from jaxrl_llm import losses, register

register.loss(
  "policy_gradient",
  losses.policy_gradient_loss,
  old_logprobs="proximal_logprobs",
)
