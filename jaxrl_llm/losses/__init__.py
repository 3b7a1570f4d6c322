"""Losses: pure per-token functions. The caller weights and sums."""

from jaxrl_llm.losses.offpolicy import (
  Correction as Correction,
  decoupled_policy_loss as decoupled_policy_loss,
  effective_sample_ratio as effective_sample_ratio,
  ewma_update as ewma_update,
  interpolation_share as interpolation_share,
  masked_importance as masked_importance,
  mixed_logprobs as mixed_logprobs,
  truncated_importance as truncated_importance,
)
from jaxrl_llm.losses.policy import (
  ClippedPolicyLoss as ClippedPolicyLoss,
  binary_kl as binary_kl,
  cispo_loss as cispo_loss,
  clipped_policy_loss as clipped_policy_loss,
  gspo_loss as gspo_loss,
  mean_over_sequence as mean_over_sequence,
  policy_gradient_loss as policy_gradient_loss,
  rejection_policy_loss as rejection_policy_loss,
)
from jaxrl_llm.losses.regularizers import (
  entropy_bonus as entropy_bonus,
  kl_k1 as kl_k1,
  kl_k1_plus as kl_k1_plus,
  kl_k2 as kl_k2,
  kl_k3 as kl_k3,
  kl_k3_plus as kl_k3_plus,
  nll as nll,
)
from jaxrl_llm.losses.value import (
  ClippedValueLoss as ClippedValueLoss,
  clipped_value_loss as clipped_value_loss,
)
