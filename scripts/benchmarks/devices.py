"""Measures the parts of a run on one device, for scripts/accelerator.py.

A value whose name ends in `_bytes_per_s` or `_flops_per_s` has a peak that the
device was measured or is said to reach.
"""

import argparse
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import train_steps, workloads
from benchmarks.peers import SHAPES

from jaxrl_llm import base_models, models, sync
from jaxrl_llm.metrics.chips import PEAK_FLOPS
from jaxrl_llm.models.shapes import MODELS, multiplied_params
from jaxrl_llm.sampling import EngineConfig, new_requests
from jaxrl_llm.types import Rollout, Status

_REPEATS = 3
_SLOTS = (1, 16, 64, 256)
# Bytes per trained parameter: float32 weight, gradient and two moments, and
# room for what is computed.
_BYTES_PER_PARAM = 24


class Sizes(NamedTuple):
  """Sizes of the measured programs."""

  copied: int  # Bytes.
  multiplied: int  # Rows and columns of a matrix.
  dtype: str
  decoded: models.ModelConfig
  prompt_length: int
  new_tokens: int
  updated: dict[str, models.ModelConfig]
  response_length: int  # For updates; 8 responses with a prompt fill a row.


_TINY = dataclasses.replace(
  MODELS["qwen2.5-1.5b"],
  **SHAPES["tiny"].fields
  | {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1},
)
SIZES = {
  "full": Sizes(
    copied=2**31,
    multiplied=8192,
    dtype="bfloat16",
    decoded=MODELS["qwen2.5-1.5b"],
    prompt_length=128,
    new_tokens=256,
    updated={k: MODELS[k] for k in ("qwen2.5-1.5b", "qwen2.5-7b")},
    response_length=1024,
  ),
  "small": Sizes(
    copied=2**28,
    multiplied=2048,
    dtype="float32",
    decoded=_TINY,
    prompt_length=16,
    new_tokens=64,
    updated={"tiny": _TINY},
    response_length=128,
  ),
}


def seconds_of(call: Callable[[], Any]) -> float:
  """Median seconds of a call, after one that compiles."""
  seconds = []
  for _ in range(1 + _REPEATS):
    begin_s = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - begin_s)
  return statistics.median(seconds[1:])


def measure_device(sizes: Sizes) -> dict[str, Any]:
  """Measures the device's name, copy bandwidth and matrix products."""
  device = jax.devices()[0]
  x = jnp.zeros(sizes.copied // 4, jnp.float32)
  copy_s = seconds_of(functools.partial(jax.jit(lambda x: x + 1), x))
  del x
  shape = (sizes.multiplied, sizes.multiplied)
  a = jax.random.normal(jax.random.key(0), shape, sizes.dtype)
  product_s = seconds_of(functools.partial(jax.jit(jnp.matmul), a, a))
  peak = PEAK_FLOPS.get(device.device_kind)
  return {
    "memory_gib": _memory_bytes() / 2**30,
    "copy_bytes_per_s": 2 * sizes.copied / copy_s,
    "matmul_flops_per_s": 2 * sizes.multiplied**3 / product_s,
  } | ({"data_sheet_flops_per_s": peak} if peak else {})


def _memory_bytes() -> int:
  """Returns the memory that programs may use; 0 if unknown."""
  return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def measure_agreement(sizes: Sizes) -> dict[str, float]:
  """Difference of log-probs, sampler against trainer, over the tolerance."""
  path = str(base_models.BASE)
  base = models.hf.read_config(path)
  trained = models.hf.read_params(path, base, dtype=jnp.float32)
  few = dataclasses.replace(sizes.decoded, num_layers=4)
  out = {}
  for dtype in ("float32", "bfloat16"):
    limit = sync.tolerance(dtype, platforms={jax.default_backend()})
    for name, config, params in (("base", base, trained), ("wide", few, None)):
      fns = _make_policy(config, dtype)
      params = jax.device_put(params or workloads.random_params(fns))
      tokens = sync.parity_tokens(config.vocab_size, rows=8, length=64)
      check = sync.make_parity_check(
        fns, tokens, tolerance=float("inf"), page_size=16
      )
      sampled = jax.jit(fns.for_sampling)(params)
      error = check(params, sync.VersionedWeights(sampled, 0, checksum=0))
      out[f"{name}_{dtype}_error"] = error
      out[f"{name}_{dtype}_error_over_tolerance"] = error / limit
  return out


def _make_policy(config: models.ModelConfig, dtype: str) -> models.ModelFns:
  return models.make_policy(config, numerics=models.Numerics(activations=dtype))


def measure_decode(sizes: Sizes) -> dict[str, float]:
  """Tokens per second of decode calls, and bytes that they had to read."""
  config = sizes.decoded
  fns = _make_policy(config, sizes.dtype)
  params = workloads.random_params(fns)
  itemsize = jnp.dtype(sizes.dtype).itemsize
  weights = multiplied_params(config) * itemsize
  kv_token = config.num_layers * config.num_kv_heads * config.head_dim * 2
  lengths = {"prompt_length": sizes.prompt_length}
  lengths["new_tokens"] = sizes.new_tokens
  rng, out = np.random.default_rng(0), {}
  for slots in _SLOTS:
    sampler = workloads.Sampler(fns, params, slots=slots, **lengths)
    shape = (slots, sizes.prompt_length)
    prompts = rng.integers(2, config.vocab_size, shape).tolist()
    for _ in range(2):  # The first one compiles.
      sampler(prompts, np.arange(slots)[:, None])
    # Decode calls that waited for no prefill.
    calls = [call for call in sampler.engine.trace if not call.prefill_calls]
    seconds = sum(call.seconds for call in calls)
    steps = sum(call.steps for call in calls)
    # The pages of a call are full but for the part that it writes.
    kv = sum(c.steps * c.kv_capacity for c in calls) * kv_token * itemsize
    out[f"slots_{slots}_tokens_per_s"] = slots * steps / seconds
    out[f"slots_{slots}_bytes_per_s"] = (steps * weights + kv) / seconds
  return out


def measure_update(sizes: Sizes) -> dict[str, float]:
  """Policy updates on two packed rows, as many layers as fit the device."""
  options = argparse.Namespace(batch=16, group_size=4, micro_batch_size=1)
  options.max_tokens_per_row, out = 8 * sizes.response_length, {}
  for name, whole in sizes.updated.items():
    config = _that_fits(whole)
    fns = _make_policy(config, sizes.dtype)
    batch = train_steps.make_batch(fns, _rollout(config, sizes), options)
    tokens = int(np.sum(np.asarray(batch.packed.segments) > 0))
    update, optimizer = train_steps.make_update(fns)
    state = train_steps.create(optimizer, workloads.random_params(fns))
    update_s = seconds_of(functools.partial(_step, update, batch, [state]))
    out[f"{name}_layers"] = config.num_layers
    out[f"{name}_update_s"] = update_s
    out[f"{name}_tokens_per_s"] = tokens / update_s
    flops = 6 * multiplied_params(config) * tokens
    out[f"{name}_flops_per_s"] = flops / update_s
  return out


def _step(update, batch, held):
  """Updates the state in `held`, whose buffers are taken."""
  held[0], _ = update(held[0], batch, np.float32(1.0))
  return held[0]


def _that_fits(config: models.ModelConfig) -> models.ModelConfig:
  """A model with as many of its layers as the device can train."""
  most = (_memory_bytes() or math.inf) / _BYTES_PER_PARAM
  fewer = range(config.num_layers, 1, -1)
  candidates = (dataclasses.replace(config, num_layers=n) for n in fewer)
  fitting = (c for c in candidates if models.num_params(c) <= most)
  return next(fitting, dataclasses.replace(config, num_layers=1))


def _rollout(config: models.ModelConfig, sizes: Sizes) -> Rollout:
  """Random responses, four to a prompt, each with it of equal length."""
  length = sizes.response_length - sizes.prompt_length
  draw = functools.partial(np.random.default_rng(0).integers, 2)
  room = EngineConfig(16, sizes.prompt_length, length, stop_tokens=())
  prompts = draw(config.vocab_size, size=(4, sizes.prompt_length)).tolist()
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
  "agreement": measure_agreement,
  "decode": measure_decode,
  "update": measure_update,
}
