"""Verifies that the sampler has the trainer's current weights.

Versions are compared before every rollout, at no cost, but they do not reveal
weights that were never delivered. Checksums do, but computing them reads all
weights on both sides. Within a process, where only a bug can make them differ,
checksums are compared every few steps; a transport between processes should
always verify.
"""

from jaxrl_llm import digest
from jaxrl_llm.digest import Checksums
from jaxrl_llm.sync.transfer import SyncError, VersionedWeights


def check_version(weights: VersionedWeights, version: int) -> None:
  """Compares the version that the sampler holds with the trainer's.

  Args:
    weights: weights of the sampler.
    version: version of the trainer: iterations trained.

  Raises:
    SyncError: The versions differ.
  """
  if weights.version != version:
    raise SyncError(
      f"the sampler holds version {weights.version}, but the trainer is at"
      f" version {version}: transfer the policy before sampling from it"
    )


def verify(
  weights: VersionedWeights, wanted: Checksums, *, version: int
) -> None:
  """Compares the sampler's weights with the trainer's, bit by bit.

  Detects skipped transfers, other weights than the policy's, a single stale
  leaf, a version raised without a transfer, and donated buffers.

  Args:
    weights: weights of the sampler.
    wanted: checksums of the trainer's parameters after the same cast
      (`WeightTransfer.checksums`).
    version: version of the trainer.

  Raises:
    SyncError: Version, checksum or a leaf differs; the message names the first.
  """
  check_version(weights, version)
  held = _held(weights)
  changed = digest.combine(held) != weights.checksum
  # A leaf missing on one side counts as different.
  names = {**wanted, **held}
  wrong = [name for name in names if held.get(name) != wanted.get(name)]
  if wrong:
    count = f"{len(wrong)} of {len(names)} leaves"
    raise SyncError(
      f"{wrong[0]} ({'every leaf' if len(wrong) == len(names) else count}) of"
      " the sampler differs from the trainer's, although both are at"
      f" version {version}"
      + (", and also differs from what was sent" if changed else "")
      + ": transfer the policy again before sampling from it"
    )
  if changed:
    raise SyncError(
      f"the checksum of the sampler's version {version} does not match its"
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
