"""Transfers the policy's weights to the sampler and verifies them."""

from jaxrl_llm.sync.parity import (
  Tolerance as Tolerance,
  check_sampled as check_sampled,
  make_parity_check as make_parity_check,
  parity_tokens as parity_tokens,
  tolerance as tolerance,
)
from jaxrl_llm.sync.transfer import (
  SyncError as SyncError,
  VersionedWeights as VersionedWeights,
  WeightTransfer as WeightTransfer,
)
from jaxrl_llm.sync.verify import (
  check_version as check_version,
  verify as verify,
)
