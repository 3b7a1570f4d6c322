"""The policy's way to the sampler: pushed, stamped, verified; or patched."""

from jaxrl_llm.sync.digesting import Digests, digest, digests
from jaxrl_llm.sync.errors import SyncError
from jaxrl_llm.sync.gate import Gate, verify
from jaxrl_llm.sync.patch import LeafPatch, Patch, apply, diff
from jaxrl_llm.sync.probe import (
  TOLERANCES,
  make_probe,
  probe_tokens,
  tolerance,
)
from jaxrl_llm.sync.push import (
  Link,
  SamplerWeights,
  layout_shardings,
  stamp,
)
from jaxrl_llm.sync.wire import from_bytes, to_bytes

__all__ = [
  "Digests",
  "Gate",
  "LeafPatch",
  "Link",
  "Patch",
  "SamplerWeights",
  "SyncError",
  "TOLERANCES",
  "apply",
  "diff",
  "digest",
  "digests",
  "from_bytes",
  "layout_shardings",
  "make_probe",
  "probe_tokens",
  "stamp",
  "to_bytes",
  "tolerance",
  "verify",
]
