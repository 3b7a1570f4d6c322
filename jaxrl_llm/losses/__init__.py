"""Losses: pure per-token functions. The caller weights and sums."""

from jaxrl_llm.losses.policy import ClippedPolicyLoss, clipped_policy_loss
from jaxrl_llm.losses.regularizers import kl_k1, kl_k2, kl_k3, nll
from jaxrl_llm.losses.value import ClippedValueLoss, clipped_value_loss

__all__ = [
  "ClippedPolicyLoss",
  "ClippedValueLoss",
  "clipped_policy_loss",
  "clipped_value_loss",
  "kl_k1",
  "kl_k2",
  "kl_k3",
  "nll",
]
