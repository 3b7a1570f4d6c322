"""Weight transfer from trainer to sampler, in groups of leaves.

The sampler's copy has its own dtype and layout and may be on another mesh. It
is made on the trainer's mesh and moved to the sampler's, one group of leaves at
a time, so that little memory is needed in addition to the two copies. It
carries the policy's version and a checksum.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl_llm import digest
from jaxrl_llm.digest import Checksums
from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.sync import across
from jaxrl_llm.system import processes

MAX_BYTES = 256 << 20


class SyncError(InputError):
  """Raised if the sampler's weights are not the trainer's current ones."""


@dataclasses.dataclass(frozen=True)
class VersionedWeights:
  """Parameters with their version and checksum.

  Not a pytree: mapped parameters would keep an outdated checksum.
  """

  params: Any  # In the sampler's layout.
  version: int  # Iterations that the policy was trained for.
  checksums: Checksums  # Checksums of `params` before the transfer.

  @property
  def checksum(self) -> int:
    """Checksum of all parameters."""
    return digest.combine(self.checksums)


class WeightTransfer:
  """Transfers the trainer's parameters to the sampler; compiled once."""

  def __init__(
    self,
    layout: Callable[[Any], Any],
    shapes: Any,
    *,
    source: Any = None,
    target: Any = None,
    constant: Callable[[str], bool] = lambda name: False,
    max_bytes: int = MAX_BYTES,
  ):
    """Plans the groups without compiling or allocating anything.

    Args:
      layout: trainer parameters -> sampler parameters (`fns.for_sampling`).
      shapes: ShapeDtypeStructs of the trainer's parameters.
      source: sharding of each sampler leaf on the trainer's mesh; None leaves
        it to the compiler.
      target: sharding of each leaf on the sampler's mesh; None keeps `source`.
      constant: (path of a sampler leaf) -> whether training never changes it.
        Such leaves are sent once and then kept.
      max_bytes: maximum bytes of a group over all devices; larger leaves form a
        group of their own. The transfer needs at most twice as much memory in
        addition to the copies, for a group as sent and as received.

    Raises:
      ValueError: max_bytes is out of range, or two leaves have the same path.
    """
    check_number("max_bytes", max_bytes, "[1, inf)")
    sampled = jax.eval_shape(layout, shapes)
    self._names, leaves = digest.named_leaves(sampled)
    self._tree = jax.tree.structure(sampled)
    self._layout = layout
    self._shapes = leaves
    anywhere = [None] * len(leaves)
    self._source = self._tree.flatten_up_to(source) if source else anywhere
    self._target = target and self._tree.flatten_up_to(target)
    self._constant = {i for i, x in enumerate(self._names) if constant(x)}
    self._programs = []
    for chosen in (self._constant, {*range(len(leaves))} - self._constant):
      chosen = sorted(chosen)
      sizes = [leaves[i].size * leaves[i].dtype.itemsize for i in chosen]
      for group in _groups(sizes, max_bytes):
        group = [chosen[i] for i in group]
        self._programs.append((group, self._program(group), self._move(group)))

  @property
  def shapes(self) -> Any:
    """ShapeDtypeStructs of the sampler's parameters, with given shardings."""
    arriving = [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
      for x, place in zip(self._shapes, self._target or self._source)
    ]
    return jax.tree.unflatten(self._tree, arriving)

  def send(
    self, params: Any, version: int, replaces: VersionedWeights | None = None
  ) -> VersionedWeights:
    """Sends the policy to the sampler.

    Args:
      params: the trainer's parameters; the result shares no memory with them,
        so that they may be donated.
      version: version of the policy: iterations trained.
      replaces: an earlier result. Its constant leaves are kept, and the others
        deleted group by group as the new ones arrive; without it both copies
        stay alive.
    """
    old = jax.tree.leaves(replaces.params) if replaces else []
    sent, arrived = {}, {}
    for group, program, move in self._programs:
      names = [self._names[i] for i in group]
      replaced = [old[i] for i in group] if old else []
      if replaced and group[0] in self._constant:
        sent |= {name: replaces.checksums[name] for name in names}
        arrived |= zip(group, replaced)
        continue
      leaves = program(params)
      sent |= digest.leaf_checksums(names, leaves)
      for leaf in replaced:
        leaf.delete()
      # Wait for each group, or all would be in memory at once.
      arrived |= zip(group, processes.ready(move(leaves)))
    params = [arrived[i] for i in range(len(self._names))]
    params = jax.tree.unflatten(self._tree, params)
    return VersionedWeights(params, version, sent)

  def checksums(self, params: Any) -> dict[str, int]:
    """Returns checksums of the sampler's parameters, by path."""
    out = {}
    for group, program, _ in self._programs:
      names = [self._names[i] for i in group]
      out |= digest.leaf_checksums(names, program(params))
    return out

  def _program(self, group: Sequence[int]) -> Callable[[Any], list[jax.Array]]:
    """Compiles some leaves of the layout; the compiler drops the others."""

    def make(params):
      leaves = jax.tree.leaves(self._layout(params))
      # jit returns new buffers, also for leaves that the layout keeps.
      return [leaves[i] for i in group]

    return jax.jit(make, out_shardings=[self._source[i] for i in group])

  def _move(self, group: Sequence[int]) -> Callable[..., list[jax.Array]]:
    """Makes the function that moves a group to the sampler's mesh."""
    if self._target is None:
      return list
    places = [self._target[i] for i in group]
    return across.make_move([self._shapes[i] for i in group], places)


def _groups(sizes: Sequence[int], most: int) -> list[list[int]]:
  """Groups consecutive leaves up to a total size of `most`."""
  groups, total = [], most
  for i, size in enumerate(sizes):
    if not groups or total + size > most:
      groups.append([])
      total = 0
    groups[-1].append(i)
    total += size
  return groups
