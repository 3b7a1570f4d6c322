"""Measures the parts of a run on one device, for scripts/accelerator.py.

Every part yields its numbers as soon as they are measured, so that they are
kept if it is interrupted. Values whose names end in `_bytes_per_s` or
`_flops_per_s` are compared with a measured or specified peak of the device.
"""

import dataclasses
import functools
import math
import statistics
import timeit
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import train_steps, workloads
from benchmarks.peers import SHAPES

from jaxrl_llm import models
from jaxrl_llm.errors import InputError
from jaxrl_llm.metrics.chips import PEAK_FLOPS
from jaxrl_llm.models import backends
from jaxrl_llm.models.transformer import multiplied_params
from jaxrl_llm.sampling import EngineConfig, new_requests
from jaxrl_llm.tools.simulate.models import MODELS
from jaxrl_llm.types import Rollout, Status

_REPEATS = 3
_SLOTS = (1, 16, 64, 256)
# Bytes per trained parameter: float32 weight, gradient and two moments, plus
# temporaries.
_BYTES_PER_PARAM = 24


class Sizes(NamedTuple):
  """Sizes of the measured programs; the defaults are for an accelerator."""

  copied: int = 2**31  # Bytes.
  multiplied: int = 8192  # Rows and columns of a matrix.
  dtype: str = "bfloat16"
  decoded: models.ModelConfig = MODELS["qwen2.5-1.5b"]
  prompt_length: int = 128
  new_tokens: int = 256
  agreed_tokens: int = 2048  # Length of responses with compared log-probs.
  updated: Mapping[str, models.ModelConfig] = {
    "0.5b": MODELS["one-gpu-0.5b"],
    "1.5b": MODELS["qwen2.5-1.5b"],
    "7b": MODELS["qwen2.5-7b"],
  }
  response_length: int = 1024  # For updates; 8 with their prompts fill a row.


_TINY = dataclasses.replace(
  MODELS["qwen2.5-1.5b"],
  **SHAPES["tiny"] | {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1},
)
SIZES = {
  "full": Sizes(),
  "small": Sizes(
    copied=2**28,
    multiplied=2048,
    dtype="float32",
    decoded=_TINY,
    prompt_length=16,
    new_tokens=64,
    agreed_tokens=64,
    updated={"tiny": _TINY},
    response_length=128,
  ),
}
Numbers = dict[str, float]


def seconds_of(call: Callable[[], Any]) -> float:
  """Returns the median seconds of a call, after a first one that compiles."""
  ready = lambda: jax.block_until_ready(call())
  seconds = timeit.repeat(ready, number=1, repeat=1 + _REPEATS)
  return statistics.median(seconds[1:])


def measure_device(sizes: Sizes) -> Iterator[Numbers]:
  """Measures the device's memory, copy bandwidth and matrix-product rate."""
  device = jax.devices()[0]
  peak = PEAK_FLOPS.get(device.device_kind)
  yield {"memory_gib": _memory_bytes() / 2**30} | (
    {"data_sheet_flops_per_s": peak} if peak else {}
  )
  x = jnp.zeros(sizes.copied // 4, jnp.float32)
  copy_s = seconds_of(functools.partial(jax.jit(lambda x: x + 1), x))
  yield {"copy_bytes_per_s": 2 * sizes.copied / copy_s}
  del x
  shape = (sizes.multiplied, sizes.multiplied)
  a = jax.random.normal(jax.random.key(0), shape, sizes.dtype)
  product_s = seconds_of(functools.partial(jax.jit(jnp.matmul), a, a))
  yield {"matmul_flops_per_s": 2 * sizes.multiplied**3 / product_s}


def _memory_bytes() -> int:
  """Returns the memory that programs may use; 0 if unknown."""
  return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def measure_attention(sizes: Sizes) -> Iterator[Numbers]:
  """Measures the attention of one layer with every backend of the device.

  Training attends in one packed row of 8 samples, forward and with gradients;
  decoding attends from 64 slots to the pages of 64 samples. Decoding kernels
  are measured with three block sizes; the first, 0, is chosen by shape.
  """
  kind, dtype = sizes.decoded.layers[0].attention, sizes.dtype
  time, slots, page = 8 * sizes.response_length, 64, 16
  draw = lambda *shape: jax.random.normal(jax.random.key(0), shape, dtype)
  heads = kind.num_heads, kind.num_kv_heads, kind.num_kv_heads
  row = [draw(1, time, n, kind.head_dim) for n in heads]
  segments = jnp.repeat(jnp.arange(1, 9), sizes.response_length)[None]
  segments = segments, jnp.zeros_like(segments)  # No prefixes.
  query = draw(slots, 1, kind.num_heads, kind.head_dim)
  blocks = sizes.response_length // page
  pages = np.arange(slots * blocks, dtype=np.int32).reshape(slots, blocks)
  size = {"shards": 1, "pages": pages.size, "page_size": page}
  tables = models.make_block_tables(pages, **size)
  last = jnp.full((slots, 1), sizes.response_length - 1)

  def total(attend, *arrays):
    return attend(*arrays).astype(jnp.float32).sum()

  for name in ("xla", "pallas"):
    try:
      backend = backends.choose(name, [kind])
    except InputError:
      continue  # The device does not have this backend.
    attend = backend.make_packed_attention(kind, sharding=None).attend
    gradient = jax.grad(functools.partial(total, attend), (0, 1, 2))
    parts = {
      f"packed_{name}_s": (attend, *row, *segments),
      f"packed_gradient_{name}_s": (gradient, *row, *segments),
    }
    for block in (0, 256, 1024) if name == "pallas" else (0,):
      paged = backend.make_kernels(kind, sharding=None, kv_block=block)
      label = f"paged_{name}_{block or ''}".strip("_")
      layer = paged.init_paged(**size, dtype=dtype)
      arrays = query, layer, tables, last
      parts[f"{label}_s"] = paged.paged_attention, *arrays
    for label, (function, *arrays) in parts.items():
      call = functools.partial(jax.jit(function), *arrays)
      yield {label: seconds_of(call)}


def measure_agreement(sizes: Sizes) -> Iterator[Numbers]:
  """Compares the log-probs of sampler and trainer on long responses."""
  for dtype in ("float32", "bfloat16"):
    fns = _make_policy(sizes.decoded, dtype)
    params, length = workloads.random_params(fns), sizes.agreed_tokens
    room = {"prompt_length": sizes.prompt_length, "new_tokens": length}
    sampler = workloads.Sampler(fns, params, slots=4, **room)
    prompts = _prompts(sizes.decoded, 4, sizes.prompt_length)
    rollout = sampler(prompts, np.arange(4)[:, None])
    training = train_steps.make_training(fns)
    shape = {"rows": 1, "capacity": sizes.prompt_length + length}
    batch = train_steps.make_batch(fns, training, rollout, **shape)
    scored = training.score(params, batch.packed)
    sampled = batch.inputs["proximal_logprobs"]
    found = np.abs(np.asarray(scored.logprobs) - sampled)[batch.mask]
    yield {
      f"{dtype}_tokens": found.size,
      f"{dtype}_difference_mean": float(found.mean()),
      f"{dtype}_difference_max": float(found.max()),
    }


def _make_policy(config: models.ModelConfig, dtype: str) -> models.ModelFns:
  return models.make_policy(config, numerics=models.Numerics(activations=dtype))


def _prompts(config: models.ModelConfig, count: int, length: int) -> list:
  rng = np.random.default_rng(0)
  return rng.integers(2, config.vocab_size, (count, length)).tolist()


def measure_decode(sizes: Sizes) -> Iterator[Numbers]:
  """Measures decode calls: tokens and necessarily read bytes per second."""
  config = sizes.decoded
  fns = _make_policy(config, sizes.dtype)
  params = workloads.random_params(fns)
  itemsize = jnp.dtype(sizes.dtype).itemsize
  weights = multiplied_params(config) * itemsize
  kv_token = config.num_layers * config.num_kv_heads * config.head_dim * 2
  lengths = {"prompt_length": sizes.prompt_length}
  lengths["new_tokens"] = sizes.new_tokens
  for slots in _SLOTS:
    sampler = workloads.Sampler(fns, params, slots=slots, **lengths)
    prompts = _prompts(config, slots, sizes.prompt_length)
    for _ in range(2):  # The first one compiles.
      sampler(prompts, np.arange(slots)[:, None])
    # Decode calls that did not wait for a prefill.
    calls = [call for call in sampler.engine.trace if not call.prefill_calls]
    seconds = sum(call.seconds for call in calls)
    steps = sum(call.steps for call in calls)
    # The pages of a call are full, except for the part that it writes.
    kv = sum(c.steps * c.kv_capacity for c in calls) * kv_token * itemsize
    yield {
      f"slots_{slots}_tokens_per_s": slots * steps / seconds,
      f"slots_{slots}_bytes_per_s": (steps * weights + kv) / seconds,
    }


def measure_update(sizes: Sizes) -> Iterator[Numbers]:
  """Measures policy updates on two packed rows, with as many layers as fit.

  Counts 6 floating-point operations per parameter and token, and no attention.
  """
  shape = {"rows": 1, "capacity": 8 * sizes.response_length}
  for name, whole in sizes.updated.items():
    config = _that_fits(whole)
    fns = _make_policy(config, sizes.dtype)
    training, rollout = train_steps.make_training(fns), _rollout(config, sizes)
    batch = train_steps.make_batch(fns, training, rollout, **shape)
    tokens = int(np.sum(np.asarray(batch.packed.segments) > 0))
    update, state = train_steps.make_update(fns, training)
    update_s = seconds_of(functools.partial(_step, update, batch, [state]))
    flops = 6 * multiplied_params(config) * tokens
    yield {
      f"{name}_layers": config.num_layers,
      f"{name}_update_s": update_s,
      f"{name}_tokens_per_s": tokens / update_s,
      f"{name}_flops_per_s": flops / update_s,
    }


def _step(update, batch, held):
  """Replaces the state in `held` by its update, which donates its buffers."""
  held[0], _ = update.whole(held[0], batch)
  return held[0]


def _that_fits(config: models.ModelConfig) -> models.ModelConfig:
  """Returns the model with as many of its layers as the device can train."""
  most = (_memory_bytes() or math.inf) / _BYTES_PER_PARAM
  fewer = range(config.num_layers, 1, -1)
  candidates = (dataclasses.replace(config, num_layers=n) for n in fewer)
  fitting = (c for c in candidates if models.num_params(c) <= most)
  return next(fitting, dataclasses.replace(config, num_layers=1))


def _rollout(config: models.ModelConfig, sizes: Sizes) -> Rollout:
  """Returns random responses, four per prompt, all of the same length."""
  length = sizes.response_length - sizes.prompt_length
  draw = functools.partial(np.random.default_rng(0).integers, 2)
  room = EngineConfig(16, sizes.prompt_length, length, stop_tokens=())
  prompts = _prompts(config, 4, sizes.prompt_length)
  begun = new_requests(prompts, np.arange(16).reshape(4, 4), range(4), room)
  return begun.replace(
    tokens=draw(config.vocab_size, size=(16, length), dtype=np.int32),
    lengths=np.full(16, length, np.int32),
    mask=np.ones((16, length), bool),
    behavior_logprobs=begun.behavior_logprobs
    - np.log(np.float32(config.vocab_size)),
    status=np.full(16, Status.FINISHED, np.int32),
  )


PARTS = {
  "device": measure_device,
  "decode": measure_decode,
  "update": measure_update,
  "attention": measure_attention,
  "agreement": measure_agreement,
}
