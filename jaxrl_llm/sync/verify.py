"""Does the sampler hold the trainer's weights of now?

Comparing versions costs nothing and is done before every sampling. It would
pass weights that were never delivered. Comparing checksums finds those, but
reads all weights of both sides; inside one process, where only a fault of this
library can make them differ, it is done every so many steps. A transport
between processes should verify every transfer.
"""

from jaxrl_llm import digest
from jaxrl_llm.digest import Checksums
from jaxrl_llm.sync.transfer import SyncError, VersionedWeights


def check_version(weights: VersionedWeights, version: int) -> None:
  """Compares the version that the sampler holds with the trainer's.

  Args:
    weights: what the sampler holds.
    version: of the trainer: iterations trained.

  Raises:
    SyncError: they differ.
  """
  if weights.version != version:
    raise SyncError(
      f"the sampler holds version {weights.version}, but the trainer is at"
      f" version {version}: transfer the policy before sampling from it"
    )


def verify(
  weights: VersionedWeights, wanted: Checksums, *, version: int
) -> None:
  """Compares what arrived with what should have, bit by bit.

  Found are a transfer that was skipped, other weights than the policy's, a
  single stale leaf, a version that was raised without a transfer, and buffers
  that were given away.

  Args:
    weights: what the sampler holds.
    wanted: checksums of the trainer's parameters after the same cast
      (`WeightTransfer.checksums`).
    version: of the trainer.

  Raises:
    SyncError: version, checksum or a leaf differ; the line names the first.
  """
  check_version(weights, version)
  held = _held(weights)
  changed = digest.combine(held) != weights.checksum
  # A leaf that one side lacks counts as another one.
  names = {**wanted, **held}
  wrong = [name for name in names if held.get(name) != wanted.get(name)]
  if wrong:
    count = f"{len(wrong)} of {len(names)} leaves"
    raise SyncError(
      f"{wrong[0]} ({'every leaf' if len(wrong) == len(names) else count}) of"
      f" the sampler is not the trainer's, though both are at version {version}"
      + (", and not what was sent" if changed else "")
      + ": transfer the policy again before sampling from it"
    )
  if changed:
    raise SyncError(
      f"the checksum of the sampler's version {version} is not that of its"
      " parameters, though these are the trainer's; transfer again"
    )


def _held(weights: VersionedWeights) -> Checksums:
  names, leaves = digest.named_leaves(weights.params)
  for name, leaf in zip(names, leaves):
    if leaf.is_deleted():
      raise SyncError(
        f"{name} of the sampler's version {weights.version} has been deleted:"
        " its buffer was donated or replaced; transfer the policy again"
      )
  return digest.leaf_checksums(names, leaves)
