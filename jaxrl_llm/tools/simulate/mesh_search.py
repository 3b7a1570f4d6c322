"""Ranks meshes by the analytic cost model, without compiling."""

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm import config as config_lib
from jaxrl_llm import models, sharding
from jaxrl_llm.config import Settings
from jaxrl_llm.learner import core
from jaxrl_llm.metrics.chips import Chip
from jaxrl_llm.models.transformer import REMAT_POLICIES
from jaxrl_llm.tools.simulate import account

# Candidates: sizes of the tensor axis, rows per device, first-moment dtypes.
_TENSOR, _ROWS = (1, 2, 4, 8, 16), (1, 2, 4, 8)
_MOMENTS = ("float32", "bfloat16")
_MARGIN = 1.1  # Compilers use up to 9 % more than `account` estimates.
_Sampler = tuple[float, account.Sizes]  # Bytes of memory, and sizes.


class Fit(NamedTuple):
  """Settings that fit in memory, with their cost."""

  seconds: float  # Seconds per step.
  memory: float  # Bytes per device.
  mesh: tuple[int, ...]  # Sizes of the axes.
  sampler_mesh: tuple[int, ...]
  micro_batch: int
  remat_policy: str
  mu_dtype: str

  @property
  def rank(self) -> tuple:
    """Sort key: time to 1 %, then float32 first moments, then memory."""
    speed = round(100 * math.log(self.seconds))
    return speed, self.mu_dtype != "float32", self.memory

  def flags(self) -> str:
    """Returns the settings as command-line flags."""
    found = {f"mesh.{k}": n for k, n in zip(sharding.AXES, self.mesh)}
    for axis, size in zip(sharding.AXES, self.sampler_mesh):
      if axis != "context":
        found[f"sampler.mesh.{axis}"] = size
    for role in ("policy", "value"):
      found[f"optimizer.{role}.micro_batch_size"] = self.micro_batch
      found[f"optimizer.{role}.mu_dtype"] = self.mu_dtype
    found["model.remat_policy"] = self.remat_policy
    return " ".join(f"--config.{key}={value}" for key, value in found.items())


def search(
  config: Settings,
  model: models.ModelConfig,
  count: int,
  chip: Chip,
  mean_response: float = 0.0,
) -> list[Fit]:
  """Returns the meshes of learner and sampler that fit, fastest first.

  Args:
    config: config of the run; its meshes, micro-batches, remat policy and
      dtype of first moments are replaced.
    model: shape of policy and critic.
    count: number of devices.
    chip: chip of the devices.
    mean_response: mean response length in tokens; 0: a quarter of the maximum.
  """
  sizes = functools.partial(
    account.Sizes,
    model=model,
    mean_response=mean_response,
    platform=chip.platform,
  )
  found = []
  for own in {count, count // 4, count // 2, count - count // 4} - {0}:
    # The sampler shares the learner's devices, or has the remaining ones.
    free = count if own == count else count - own
    samplers = [_sampler(sizes(config, mesh=m)) for m in _meshes(model, free)]
    for mesh in _meshes(model, own, contexts=(1, 2, 4, 8)):
      learner = sizes(config.copy_and_resolve_references(), mesh=mesh)
      found += _best(learner, samplers, chip, apart=own < count)
  return sorted(found, key=lambda fit: fit.rank)


def _meshes(
  model: models.ModelConfig, count: int, contexts: Sequence[int] = (1,)
) -> list[dict[str, int]]:
  """Returns the meshes with this number of devices."""
  factors = itertools.product((1, 2, 4, 8, 16, 32, 64), contexts, _TENSOR)
  return [
    dict(zip(sharding.AXES, (data, count // rest, context, tensor)))
    for data, context, tensor in factors
    if count % (rest := data * context * tensor) == 0
    and model.num_heads % tensor == 0
  ]


def _sampler(sizes: account.Sizes) -> _Sampler:
  """Returns the memory of a sampler in bytes, and its sizes."""
  config = sizes.config
  longest = config.data.max_prompt_length + config.sampler.max_response_length
  pages = config.sampler.kv_pages * sizes.page or sizes.slots * longest
  # In bfloat16, or in the dtype of the adapters' base if that is smaller.
  stored = 2.0 * sizes.parameters
  stored = min(stored, sizes.base_bytes(["policy"]) or stored)
  memory = stored / (sizes.shards * sizes.tensor)
  memory += pages * sizes.cached_token / sizes.kv_ways
  return memory, sizes


def _best(
  sizes: account.Sizes, samplers: list[_Sampler], chip: Chip, *, apart: bool
) -> list[Fit]:
  """Returns the fastest fit of a learner mesh, or []; modifies its config."""
  config, found = sizes.config, []
  algorithm = core.make_algorithm(config)
  roles = ["policy", "value"] if algorithm.critic else ["policy"]
  each = sizes.parameters / (sizes.shards * sizes.tensor)
  trained = {role: each * sizes.trained(role) for role in roles}
  held = 4 * trained["policy"] * ("ref_logprobs" in algorithm.leaves)
  held += sizes.base_bytes(roles) / (sizes.shards * sizes.tensor)
  axes = lambda mesh: tuple(mesh[axis] for axis in sharding.AXES)
  most = sizes.rows * config_lib.mini_batch(config, "policy") / sizes.responses
  for policy, rows, dtype in itertools.product(REMAT_POLICIES, _ROWS, _MOMENTS):
    micro_batch = rows * sizes.batch_ways
    if rows > 1 and micro_batch > most:
      continue
    config.model.remat_policy = policy
    for role in roles:
      config.optimizer[role].micro_batch_size = micro_batch
    # Parameters and AdamW's second moments take four bytes each.
    moment = jnp.dtype(dtype).itemsize
    states = sum(
      count * (moment + (4 if config.optimizer[x].name == "adafactor" else 8))
      for x, count in trained.items()
    )
    parts = account.temporaries(sizes, "policy", update=True)
    own = states + held + _MARGIN * sum(parts.values())
    for of_sampler, written in samplers:
      memory = max(of_sampler, own) if apart else of_sampler + own
      if memory >= chip.usable:
        continue
      work = account.work_by_program(sizes, written)
      seconds = account.step_seconds(sizes, chip, work)
      decode = seconds.pop("sampler decode")
      train = sum(seconds.values())
      # On separate devices and with a lag, they run concurrently.
      at_once = apart and config.schedule.lag
      meshes = axes(sizes.mesh), axes(written.mesh)
      total = (max if at_once else operator.add)(decode, train)
      found.append(Fit(total, memory, *meshes, micro_batch, policy, dtype))
  return [min(found, key=lambda fit: fit.rank)] if found else []
