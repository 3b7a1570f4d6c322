"""The policy's way to the sampler: weights are transferred and verified."""

from jaxrl_llm.sync.parity import (
  TOLERANCES,
  make_parity_check,
  parity_tokens,
  tolerance,
)
from jaxrl_llm.sync.transfer import (
  SyncError,
  VersionedWeights,
  WeightTransfer,
  layout_shardings,
)
from jaxrl_llm.sync.verify import check_version, verify

__all__ = [
  "SyncError",
  "TOLERANCES",
  "VersionedWeights",
  "WeightTransfer",
  "check_version",
  "layout_shardings",
  "make_parity_check",
  "parity_tokens",
  "tolerance",
  "verify",
]
