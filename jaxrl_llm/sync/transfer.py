"""From the trainer's parameters to the sampler's, in groups of leaves.

The sampler's copy has a dtype and a layout of its own and may lie on another
mesh. It is made on the trainer's mesh and moved by a resharding `device_put`,
a group of leaves at a time, so that beside the two copies only a few bytes are
alive. What arrives has the policy's version and a checksum.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm import digest, processes, sharding
from jaxrl_llm.errors import InputError, check_number

MAX_BYTES = 256 << 20


class SyncError(InputError):
  """The sampler does not hold what it should: leaf, versions, what to do."""


@dataclasses.dataclass(frozen=True)
class VersionedWeights:
  """Parameters with their version and checksum.

  No pytree: mapped parameters would keep a wrong checksum.
  """

  params: Any  # In the sampler's layout.
  version: int  # Iterations that the policy was trained for.
  checksum: int  # Checksum of `params` before the transfer.


class WeightTransfer:
  """Sends the trainer's parameters to the sampler; compiled once."""

  def __init__(
    self,
    layout: Callable[[Any], Any],
    shapes: Any,
    *,
    source: Any = None,
    target: Any = None,
    max_bytes: int = MAX_BYTES,
  ):
    """Plans the groups; nothing is compiled or allocated yet.

    Args:
      layout: trainer parameters -> sampler parameters (`fns.for_sampling`).
      shapes: ShapeDtypeStructs of the trainer's parameters.
      source: sharding per sampler leaf in which it is made on the trainer's
        mesh (`layout_shardings`); None leaves it to the compiler.
      target: sharding per sampler leaf at the sampler; None: as it is made.
      max_bytes: most bytes of a group, summed over devices; a leaf that is
        larger goes alone. At most twice as much is alive beside the copies:
        a group as it is sent and as it arrives.

    Raises:
      ValueError: max_bytes is out of range, or two leaves have one path.
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
    sizes = [x.size * x.dtype.itemsize for x in leaves]
    groups = _groups(sizes, max_bytes)
    self._programs = [(group, self._program(group)) for group in groups]

  @property
  def shapes(self) -> Any:
    """ShapeDtypeStructs of what arrives, with its shardings where given."""
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
      version: of the policy: iterations trained.
      replaces: what an earlier call returned, whose arrays are deleted group by
        group as the new ones come; without it both copies are alive at the end.
    """
    old = replaces and jax.tree.leaves(replaces.params)
    sent, arrived = {}, [None] * len(self._names)
    for group, program in self._programs:
      leaves = program(params)
      sent |= digest.leaf_checksums([self._names[i] for i in group], leaves)
      if old is not None:
        for i in group:
          old[i].delete()
      if self._target is not None:
        leaves = jax.device_put(leaves, [self._target[i] for i in group])
      # Without waiting, all groups would be under way together.
      for i, leaf in zip(group, processes.ready(leaves)):
        arrived[i] = leaf
    params = jax.tree.unflatten(self._tree, arrived)
    return VersionedWeights(params, version, digest.combine(sent))

  def checksums(self, params: Any) -> dict[str, int]:
    """Checksums of what `send` would send, by path in the sampler's layout."""
    out = {}
    for group, program in self._programs:
      names = [self._names[i] for i in group]
      out |= digest.leaf_checksums(names, program(params))
    return out

  def _program(self, group: Sequence[int]) -> Callable[[Any], list[jax.Array]]:
    """Makes some leaves of the layout; the compiler drops the others."""

    def make(params):
      leaves = jax.tree.leaves(self._layout(params))
      # jit returns new buffers, also for what the layout leaves alone.
      return [leaves[i] for i in group]

    return jax.jit(make, out_shardings=[self._source[i] for i in group])


def layout_shardings(
  layout: Callable[[Any], Any], shapes: Any, mesh: Mesh
) -> Any:
  """Returns shardings of the sampler's leaves by the rules of `sharding`.

  Args:
    layout: trainer parameters -> sampler parameters.
    shapes: ShapeDtypeStructs of the trainer's parameters.
    mesh: the mesh, the trainer's or another.

  Returns:
    A NamedSharding per leaf of the sampler's parameters.

  Raises:
    ValueError: a leaf's path matches no rule.
  """
  return sharding.tree_shardings(jax.eval_shape(layout, shapes), mesh)


def _groups(sizes: Sequence[int], most: int) -> list[list[int]]:
  """Neighbours together as long as their sizes sum to `most` or less."""
  groups, total = [], most
  for i, size in enumerate(sizes):
    if not groups or total + size > most:
      groups.append([])
      total = 0
    groups[-1].append(i)
    total += size
  return groups
