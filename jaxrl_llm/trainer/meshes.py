"""The meshes of a run: the trainer's, and optionally one for the sampler."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_llm import config as config_lib
from jaxrl_llm import sharding
from jaxrl_llm.config import Settings
from jaxrl_llm.errors import InputError


class Meshes(NamedTuple):
  """The meshes of trainer and sampler, which may be the same."""

  trainer: Mesh
  sampler: Mesh


def make_meshes(
  config: Settings, devices: Sequence[jax.Device] | None = None
) -> Meshes:
  """Makes the meshes of trainer and sampler.

  By default the sampler shares the trainer's mesh. A separate mesh uses the
  devices that the trainer leaves free; if there are none, it arranges the same
  devices differently.

  Args:
    config: a validated config.
    devices: available devices; all by default.

  Raises:
    InputError: A mesh needs more devices than are available. With several
      processes, some devices are unused, or sampler and learner run
      concurrently on the same devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  trainer = _mesh(config, "mesh", devices)
  if not config.sampler.mesh.data:
    both = Meshes(trainer, trainer)
  else:
    free = sharding.remaining_devices(trainer, devices)
    shared = set(free) <= set(trainer.devices.flat)
    why = ", which config.mesh " + ("shares" if shared else "leaves free")
    both = Meshes(trainer, _mesh(config, "sampler.mesh", free, why))
  if jax.process_count() > 1:
    _check_processes(config, both, devices)
  return both


def _check_processes(config: Settings, both: Meshes, devices: list) -> None:
  trainer, sampler = (set(mesh.devices.flat) for mesh in both)
  if len(trainer | sampler) < len(devices):
    raise InputError(
      f"config.mesh and config.sampler.mesh use {len(trainer | sampler)} of"
      f" {len(devices)} devices, but several processes must use all; raise"
      " their sizes, or set config.mesh.data=-1"
    )
  schedule = config.schedule
  concurrent = schedule.overlap and (schedule.lag or schedule.streaming)
  if concurrent and (trainer & sampler or config.sampler.exact):
    # Each process would launch their programs in a different order.
    raise InputError(
      "config.schedule.overlap=True: with several processes, sampler and"
      " learner cannot share devices; set schedule.overlap=False, or give the"
      " sampler its own devices with sampler.mesh, without sampler.exact"
    )


def _mesh(config: Settings, key: str, devices: list, why: str = "") -> Mesh:
  """Makes the mesh of a config group; `why` explains the number of devices.

  Raises:
    InputError: The mesh needs more devices.
  """
  try:
    return sharding.make_mesh(**config_lib.get(config, key), devices=devices)
  except ValueError as error:
    raise InputError(f"config.{key}: {error}{why}; change its sizes") from error
