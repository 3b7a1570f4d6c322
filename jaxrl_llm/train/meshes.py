"""The meshes of a run: the trainer's, and the sampler's if it has its own."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_llm import config as config_lib
from jaxrl_llm import sharding
from jaxrl_llm.errors import InputError


class Meshes(NamedTuple):
  """The meshes of trainer and sampler, which may be the same."""

  trainer: Mesh
  sampler: Mesh


def make_meshes(
  config: Any, devices: Sequence[jax.Device] | None = None
) -> Meshes:
  """The meshes that trainer and sampler compute on.

  A sampler without a mesh of its own shares the trainer's. One that has its own
  takes the devices that the trainer's mesh leaves free; where that leaves none,
  it lays the same devices out anew.

  Args:
    config: a validated config.
    devices: those there are; all by default.

  Raises:
    InputError: a mesh asks for more devices than it can have, or micro-batches
      do not divide over the trainer's.
  """
  devices = list(jax.devices() if devices is None else devices)
  trainer = _mesh(config, "mesh", devices)
  _check_micro_batch_size(config, trainer)
  if jax.process_count() > 1 and trainer.size < len(devices):
    raise InputError(
      f"config.mesh takes {trainer.size} of {len(devices)} devices, but several"
      " processes train on all of theirs; raise its sizes, or data to -1"
    )
  if not config.sampler.mesh.data:
    return Meshes(trainer, trainer)
  free = sharding.remaining_devices(trainer, devices)
  shared = set(free) <= set(trainer.devices.flat)
  why = ", which config.mesh " + ("shares" if shared else "leaves free")
  return Meshes(trainer, _mesh(config, "sampler.mesh", free, why))


def _mesh(config: Any, key: str, devices: list, why: str = "") -> Mesh:
  """The mesh of a config group; `why` says more of how many devices there are.

  Raises:
    InputError: there are fewer than it needs.
  """
  try:
    return sharding.make_mesh(**config_lib.get(config, key), devices=devices)
  except ValueError as error:
    raise InputError(f"config.{key}: {error}{why}; lower its sizes") from error


def _check_micro_batch_size(config: Any, mesh: Mesh) -> None:
  split = sharding.batch_size_of(mesh)
  for role in ("policy", "value"):
    rows = config.optimizer[role].micro_batch_size
    if rows % split:
      raise InputError(
        f"config.optimizer.{role}.micro_batch_size={rows} must be a multiple of"
        f" mesh data x fsdp = {split}"
      )
