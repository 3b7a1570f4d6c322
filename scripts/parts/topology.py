"""Topologies: descriptions of absent devices, to compile programs for.

A topology is CHIP:AxB[xC] for TPUs, such as v5p:4x4x4, and CHIP:COUNT for the
GPUs of a host, such as h100:8.
"""

import math
import os
from typing import Any

import jax
from jax.experimental import topologies

from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.metrics.chips import CHIPS, Chip

# A GPU as XLA describes it (GpuTargetConfigProto), with CUDA 12.9 and
# cuDNN 9.8.
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  threads_per_core_limit: {gpu.threads} core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus} l2_cache_size: {l2}
  clock_rate_ghz: {gpu.clock_ghz}
  memory_bandwidth: {chip.bandwidth:.0f} device_memory_size: {chip.memory:.0f}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{gpu.name}"
"""


def parse(topology: str) -> tuple[Chip, int]:
  """Returns the chip of a topology, and the number of devices.

  Raises:
    InputError: The chip is unknown, or a size is not a number.
  """
  name, _, sizes = topology.partition(":")
  parts = sizes.split("x")
  if name not in CHIPS or not all(x.isdigit() and int(x) for x in parts):
    raise InputError(
      f"--topology={topology}: choose one of {', '.join(CHIPS)} with a size,"
      " such as v5p:4x4x4 or h100:8"
    )
  return CHIPS[name], math.prod(map(int, parts))


def devices_of(topology: str) -> list[Any]:
  """Returns descriptions of a topology's devices.

  Raises:
    InputError: The topology does not exist, or its compiler is missing.
  """
  chip, count = parse(topology)
  # This process needs no TPU, and other processes may load the library too.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  platform, name, extra, settings = "tpu", topology, "tpu", {}
  if gpu := chip.gpu:
    platform, name, extra = "cuda", topology.partition(":")[0], "gpu"
    shared, (major, minor) = gpu.shared_kib * 2**10, gpu.capability
    settings["topology"] = f"1x1x{count}"
    settings["target_config"] = _TARGET.format(
      **{"chip": chip, "gpu": gpu, "major": major, "minor": minor},
      **{"shared": shared, "optin": shared - 2**10, "l2": gpu.l2_mib * 2**20},
    )
  with as_input_error(
    f"--topology={topology}",
    f"does it exist, and is the compiler for {extra.upper()}s installed"
    f" (pip install -e '.[{extra}]')?",
    Exception,  # The plugin failed or is missing.
  ):
    found = topologies.get_topology_desc(name, platform, **settings)
    return list(found.devices)


def compiled(name: str, lowered: Any, topology: str) -> tuple[Any, str]:
  """Compiles a program for a topology; returns it and its HLO text.

  Raises:
    InputError: The compiler failed, or its result could not be read.
    JaxRuntimeError: The program does not fit.
  """
  gpu = parse(topology)[0].gpu
  # There is no GPU to time kernels on.
  options = {"xla_gpu_autotune_level": 0} if gpu else None
  try:
    done = lowered.compile(options)
    return done, done.as_text()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" in str(error):
      raise
    library, extra = ("CUDA's plugin", "cuda12") if gpu else ("libtpu", "tpu")
    raise InputError(
      f"{name}: the compiler failed ({str(error).splitlines()[0]}); {library}"
      f" may not match JAX {jax.__version__}: pip install"
      f" 'jax[{extra}]=={jax.__version__}'"
    ) from error
