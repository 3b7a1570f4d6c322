"""Device meshes, and the sharding of every parameter.

Axes: 'data' replicates parameters and splits the batch, 'fsdp' splits both,
'context' splits parameters and the tokens of each row, 'tensor' splits the
width of layers. `PARAMETERS` names the dimensions of a parameter by its path,
and `MESH_AXES` the axes over which a dimension is split. An optimizer's moments
are sharded like their parameter because their paths end the same way.

A mesh with expert groups also has the axis 'expert', which acts as a part of
'fsdp' for all parameters but experts. Experts are split over 'expert' and
'tensor', so that each device of a group holds different ones (`FOLDED`).
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.digest import path_name

P = PartitionSpec
AXES = ("data", "fsdp", "context", "tensor")
EXPERT = "expert"  # Only with expert groups; after 'fsdp'.
BATCH_AXES = ("data", "fsdp", EXPERT)
SLOT_AXES = (*BATCH_AXES, "context")  # The sampler does not split rows.

# Path of a parameter -> names of its dimensions; '' is never split. The first
# match applies, and no match is an error. Stacked layers have a leading
# dimension, which the sampler's layers lack. Scales of a quantised kernel have
# the dimensions of the kernel, in blocks.
PARAMETERS: tuple[tuple[str, tuple[str, ...]], ...] = (
  (r"embed/embedding$", ("vocab", "embed")),
  (r"lm_head/kernel$", ("embed", "vocab")),
  (r"layers.*/router/kernel$", ("layers", "embed", "")),
  (
    r"layers.*/experts/(gate|up)/kernel$",
    ("layers", "experts", "expert_embed", "expert_mlp"),
  ),
  (
    r"layers.*/experts/down/kernel$",
    ("layers", "experts", "expert_mlp", "expert_embed"),
  ),
  (r"layers.*/experts/.*/kernel_scale$", ("layers", "experts", "", "")),
  (r"layers.*/router/(lora_.|kernel_scale)$", ("layers", "", "")),
  (r"layers.*/(q|k|v)/kernel(_scale)?$", ("layers", "embed", "heads")),
  (r"layers.*/(q|k|v)/bias$", ("layers", "heads")),
  (r"layers.*/o/kernel(_scale)?$", ("layers", "heads", "embed")),
  (r"layers.*/(gate|up)/kernel(_scale)?$", ("layers", "embed", "mlp")),
  (r"layers.*/(gate|up)/bias$", ("layers", "mlp")),
  (r"layers.*/down/kernel(_scale)?$", ("layers", "mlp", "embed")),
  (r"layers.*/(o|down)/bias$", ("layers", "")),
  # Adapters.
  (r"layers.*/(q|k|v|gate|up)/lora_a$", ("layers", "embed", "")),
  (r"layers.*/(q|k|v)/lora_b$", ("layers", "", "heads")),
  (r"layers.*/(gate|up)/lora_b$", ("layers", "", "mlp")),
  (r"layers.*/o/lora_a$", ("layers", "heads", "")),
  (r"layers.*/down/lora_a$", ("layers", "mlp", "")),
  (r"layers.*/(o|down)/lora_b$", ("layers", "", "embed")),
  (r"(norm|[a-z]*_head|surprise)/(scale|kernel|bias)$", ()),
  # Counters of train states, optimizers and the moving average.
  (r"(^|/)(count|step|skipped|skipped_in_a_row|weight)$", ()),
)
# Name of a dimension -> axes of the mesh that split it.
MESH_AXES: dict[str, tuple[str, ...]] = {
  "": (),
  "layers": (),
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "mlp": ("tensor",),
  "embed": ("fsdp", EXPERT, "context"),
  "experts": (),
  "expert_mlp": ("tensor",),
  "expert_embed": ("fsdp", "context"),
}
# Overrides of `MESH_AXES` in a mesh with expert groups.
FOLDED = {"experts": (EXPERT, "tensor"), "expert_mlp": ()}


def make_mesh(
  *,
  data: int,
  fsdp: int,
  tensor: int,
  context: int = 1,
  expert: int = 1,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Makes a mesh with the axes of `AXES`, and `EXPERT` for expert groups.

  Args:
    data: size of the axis; -1 takes all remaining devices.
    fsdp: size of the axis.
    tensor: size of the axis.
    context: size of the axis.
    expert: devices per expert group: a tensor group times a part of fsdp; 1 for
      no expert groups.
    devices: devices to use, from the first on; all by default.

  Raises:
    ValueError: A size is out of range or does not divide, the mesh needs more
      devices than are available, or data=-1 leaves some idle.
  """
  asked = f"mesh data={data} x fsdp={fsdp} x context={context}"
  asked += f" x tensor={tensor}"
  if min(fsdp, context, tensor) < 1 or (data < 1 and data != -1):
    raise ValueError(
      f"{asked}: sizes must be >= 1 (data=-1 takes all remaining devices)"
    )
  if expert > 1 and (expert % tensor or fsdp * tensor % expert):
    raise ValueError(
      f"{asked}: expert={expert} must be a multiple of tensor that divides"
      f" fsdp x tensor = {fsdp * tensor}"
    )
  devices = list(jax.devices() if devices is None else devices)
  rest = fsdp * context * tensor
  if data == -1:
    data = max(len(devices) // rest, 1)
    if idle := max(len(devices) - data * rest, 0):
      raise ValueError(f"{asked} leaves {idle} idle of {len(devices)} devices")
  needed = data * rest
  if needed > len(devices):
    raise ValueError(
      f"{asked} needs {needed} devices, but there are {len(devices)}"
    )
  part = max(expert // tensor, 1)
  sizes = {"data": data, "fsdp": fsdp // part, EXPERT: part}
  sizes |= {"context": context, "tensor": tensor}
  if expert == 1:
    del sizes[EXPERT]
  grid = np.asarray(devices[:needed]).reshape(*sizes.values())
  # Auto: in Explicit mode some products of sharded arrays are type errors.
  return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def axes_of(name: str, mesh: Mesh) -> tuple[str, ...]:
  """Returns the axes of a mesh that split a dimension of parameters."""
  table = MESH_AXES | (FOLDED if EXPERT in mesh.shape else {})
  return _present(table[name], mesh)


def expert_axes(mesh: Mesh) -> tuple[str, ...]:
  """Returns the axes over which experts are split; () if there are none."""
  return axes_of("experts", mesh)


def _present(axes: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
  return tuple(axis for axis in axes if axis in mesh.shape)


def remaining_devices(
  mesh: Mesh, devices: Sequence[jax.Device]
) -> list[jax.Device]:
  """Returns the devices outside of a mesh, or its own if there are none."""
  own = list(mesh.devices.flat)
  return [device for device in devices if device not in own] or own


def batch_size_of(mesh: Mesh) -> int:
  """Returns the number of shards of a batch."""
  return math.prod(mesh.shape[a] for a in _present(BATCH_AXES, mesh))


def slots_size_of(mesh: Mesh) -> int:
  """Returns the number of shards of the sampler's slots."""
  return math.prod(mesh.shape[a] for a in _present(SLOT_AXES, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
  """Sharding of arrays that are replicated on all devices."""
  return NamedSharding(mesh, P())


def along_batch(mesh: Mesh, *, axis: int = 0) -> NamedSharding:
  """Sharding of arrays that are split like a batch along the given axis."""
  return NamedSharding(mesh, P(*[None] * axis, _present(BATCH_AXES, mesh)))


def head_sharding(mesh: Mesh, vocabulary: int) -> NamedSharding:
  """Sharding of head kernels [N, D, V], one for each group of devices.

  The devices of a group share the same tokens. Groups are in the order of
  `models.context.shards_to_rows`. The vocabulary is split if it divides.
  """
  groups = ("context", *_present(BATCH_AXES, mesh))
  return NamedSharding(mesh, P(groups, None, _split("vocab", vocabulary, mesh)))


def with_leading_axis(place: NamedSharding) -> NamedSharding:
  """Sharding of arrays stacked along a new first axis, [N, ...]."""
  return NamedSharding(place.mesh, P(None, *place.spec))


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
  """Returns the NamedSharding of each leaf of parameters or of a train state.

  An axis that does not divide a dimension does not split it.

  Args:
    tree: arrays or ShapeDtypeStructs in a tree whose paths match `PARAMETERS`.
    mesh: the mesh.

  Raises:
    ValueError: The path of a leaf matches no rule, or an axis of the mesh would
      split two of its dimensions.
  """

  def leaf_sharding(path, leaf):
    names = _dimensions(path_name(path), mesh)
    names = names[max(len(names) - leaf.ndim, 0) :] + ("",) * leaf.ndim
    sizes = zip(names, leaf.shape)
    return NamedSharding(mesh, P(*(_split(*x, mesh) for x in sizes)))

  return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def _split(name: str, size: int, mesh: Mesh) -> tuple[str, ...] | None:
  """Returns the axes that split a dimension, as many as divide its size."""
  axes = axes_of(name, mesh)
  while size % math.prod(mesh.shape[axis] for axis in axes):
    axes = axes[:-1]
  return axes or None


def _dimensions(name: str, mesh: Mesh) -> tuple[str, ...]:
  """Returns the dimension names of a parameter by its path."""
  rules = (names for pattern, names in PARAMETERS if re.search(pattern, name))
  dimensions = next(rules, None)
  if dimensions is None:
    raise ValueError(f"no sharding rule matches parameter {name!r}")
  axes = [axis for each in dimensions for axis in axes_of(each, mesh)]
  if len(set(axes)) < len(axes):
    raise ValueError(
      f"parameter {name!r} has dimensions {dimensions}, two of which would be"
      f" split by the same mesh axis: {axes}; change sharding.MESH_AXES"
    )
  return dimensions


def slot_sharding(mesh: Mesh, kv_heads: int) -> NamedSharding:
  """Sharding of the sampler's arrays [S, K, ...]: slots, and KV heads.

  KV heads are split if the axis divides their number, so that the queries of a
  head are on the same device as its keys and values.
  """
  heads = _split("heads", kv_heads, mesh)
  return NamedSharding(mesh, P(_present(SLOT_AXES, mesh), heads))


def lookup_shardings(states: NamedSharding, width: int) -> list[NamedSharding]:
  """Shardings of embeddings from the lookup to the hidden states.

  In the first, a device has the columns of its shard of the table for all
  tokens of its group of devices. Each step from there is an all-to-all along
  one dimension: XLA would gather all embeddings for both at once.

  Args:
    states: sharding of hidden states [R, C, D].
    width: D.

  Returns:
    Shardings of arrays [R, C, D]; the last is `states`.
  """
  split = _split("embed", width, states.mesh) or ()
  rows, tokens = (
    tuple(jax.tree.leaves(axes)) for axes in (*states.spec, None, None)[:2]
  )
  without = lambda axes, taken: tuple(x for x in axes if x not in taken)
  rest = without(rows, split)
  specs = (
    P(rest, without(tokens, split), split),
    P(rest, tokens, without(split, tokens)),
  )
  return [*(NamedSharding(states.mesh, spec) for spec in specs), states]


def packed_kv_sharding(mesh: Mesh, kv_heads: int) -> NamedSharding:
  """Sharding of keys and values [R, C, K, d] in training."""
  heads = _split("heads", kv_heads, mesh)
  return NamedSharding(mesh, P(_present(BATCH_AXES, mesh), "context", heads))


def bytes_per_device(tree: Any) -> float:
  """Returns bytes per device of sharded arrays or ShapeDtypeStructs."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )
