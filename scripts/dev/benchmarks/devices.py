"""Measures the parts of a run on one device, for scripts/dev/accelerator.py.

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
from jaxrl_llm import base_models, models, sync
from jaxrl_llm.learner.optimizer import create_train_state
from jaxrl_llm.metrics.chips import PEAK_FLOPS
from jaxrl_llm.models.shapes import MODELS
from jaxrl_llm.sampling import Engine, EngineConfig, SamplingSettings
from jaxrl_llm.sampling.stats import DecodeCall
from jaxrl_llm.types import Rollout, Status

_REPEATS = 3
_SLOTS = (1, 16, 64, 256)
# Of a parameter in training: float32 weight, gradient and two moments, and
# room for what is computed.
_BYTES_PER_PARAM = 24


class Sizes(NamedTuple):
  """How large the measured programs are."""

  copied: int  # Bytes.
  multiplied: int  # Rows and columns of a matrix.
  dtype: str
  decoded: models.ModelConfig
  prompt_length: int
  new_tokens: int
  updated: dict[str, models.ModelConfig]
  response_length: int  # Of an update; 8 of them with a prompt fill a row.


_TINY = dataclasses.replace(
  MODELS["qwen2.5-1.5b"],
  vocab_size=4096,
  hidden_size=256,
  intermediate_size=1024,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
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


def seconds_of(function: Callable[..., Any], *arguments: Any) -> float:
  """Median seconds of a call, after one that compiles."""
  jax.block_until_ready(function(*arguments))
  seconds = []
  for _ in range(_REPEATS):
    begin_s = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    seconds.append(time.perf_counter() - begin_s)
  return statistics.median(seconds)


def measure_device(sizes: Sizes) -> dict[str, Any]:
  """What it is, copies (read and written) and multiplies."""
  device = jax.devices()[0]
  x = jnp.zeros(sizes.copied // 4, jnp.float32)
  copy_s = seconds_of(jax.jit(lambda x: x + 1), x)
  del x
  shape = (sizes.multiplied, sizes.multiplied)
  a = jax.random.normal(jax.random.key(0), shape, sizes.dtype)
  product_s = seconds_of(jax.jit(jnp.matmul), a, a)
  peak = PEAK_FLOPS.get(device.device_kind)
  return {
    "memory_gib": _memory_bytes() / 2**30,
    "copy_bytes_per_s": 2 * sizes.copied / copy_s,
    "matmul_flops_per_s": 2 * sizes.multiplied**3 / product_s,
  } | ({"data_sheet_flops_per_s": peak} if peak else {})


def _memory_bytes() -> int:
  """That programs may use; 0 where the device does not say."""
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
      fns = models.make_policy(config, dtype=dtype)
      params = params or workloads.random_params(fns)
      check = sync.make_parity_check(
        fns,
        sync.parity_tokens(config.vocab_size, rows=8, length=64),
        tolerance=float("inf"),
        page_size=16,
      )
      params = jax.device_put(params)
      weights = sync.VersionedWeights(
        params=jax.jit(fns.for_sampling)(params), version=0, checksum=0
      )
      error = check(params, weights)
      out[f"{name}_{dtype}_error"] = error
      out[f"{name}_{dtype}_error_over_tolerance"] = error / limit
  return out


def measure_decode(sizes: Sizes) -> dict[str, float]:
  """Tokens per second of decode calls, and bytes that they had to read."""
  config = sizes.decoded
  fns = models.make_policy(config, dtype=sizes.dtype)
  params = jax.jit(fns.for_sampling)(workloads.random_params(fns))
  itemsize = jnp.dtype(sizes.dtype).itemsize
  weights = _multiplied_params(config) * itemsize
  kv_token = config.num_layers * config.num_kv_heads * config.head_dim * 2
  out = {}
  for slots in _SLOTS:
    calls = _decode_calls(fns, params, sizes, slots)
    seconds = sum(call.seconds for call in calls)
    steps = sum(call.steps for call in calls)
    # The pages of a call are full but for the part that it writes.
    kv = sum(c.steps * c.kv_capacity for c in calls) * kv_token * itemsize
    out[f"slots_{slots}_tokens_per_s"] = slots * steps / seconds
    out[f"slots_{slots}_bytes_per_s"] = (steps * weights + kv) / seconds
  return out


def _decode_calls(fns, params, sizes: Sizes, slots: int) -> list[DecodeCall]:
  """Those of a full engine, compiled before, which waited for no prefill."""
  engine = Engine(
    fns,
    EngineConfig(
      slots=slots,
      max_prompt_length=sizes.prompt_length,
      max_response_length=sizes.new_tokens,
      stop_tokens=(),
    ),
  )
  shape = (slots, sizes.prompt_length)
  prompts = np.random.default_rng(0).integers(
    2, sizes.decoded.vocab_size, shape
  )
  for _ in range(2):
    engine.generate(
      params,
      prompts.tolist(),
      sample_ids=np.arange(slots)[:, None],
      key=jax.random.key(0),
      settings=SamplingSettings(),
    )
  return [call for call in engine.trace if not call.prefill_calls]


def measure_update(sizes: Sizes) -> dict[str, float]:
  """Policy updates on two packed rows, as many layers as fit the device."""
  out = {}
  for name, whole in sizes.updated.items():
    config = _that_fits(whole)
    fns = models.make_policy(config, dtype=sizes.dtype)
    options = argparse.Namespace(
      batch=16,
      group_size=4,
      micro_batch_size=1,
      max_tokens_per_row=8 * sizes.response_length,
    )
    batch = train_steps.make_batch(fns, _rollout(config, sizes), options)
    tokens = int(np.sum(np.asarray(batch.packed.segments) > 0))
    update, optimizer = train_steps.make_update(fns)
    create = functools.partial(create_train_state, optimizer=optimizer)
    params = workloads.random_params(fns)
    state = jax.jit(create, donate_argnums=0)(params)
    del params
    seconds = []
    for _ in range(1 + _REPEATS):
      begin_s = time.perf_counter()
      state, _ = update(state, batch, np.float32(1.0))
      jax.block_until_ready(state)
      seconds.append(time.perf_counter() - begin_s)
    update_s = statistics.median(seconds[1:])
    out[f"{name}_layers"] = config.num_layers
    out[f"{name}_update_s"] = update_s
    out[f"{name}_tokens_per_s"] = tokens / update_s
    flops = 6 * _multiplied_params(config) * tokens
    out[f"{name}_flops_per_s"] = flops / update_s
    del state
  return out


def _multiplied_params(config: models.ModelConfig) -> int:
  """Parameters that a token is multiplied with: no embedding of its own."""
  looked_up = 0 if config.tie_word_embeddings else 1
  embedding = config.vocab_size * config.hidden_size
  return models.num_params(config) - looked_up * embedding


def _that_fits(config: models.ModelConfig) -> models.ModelConfig:
  """A model with as many of its layers as the device can train."""
  most = (_memory_bytes() or math.inf) / _BYTES_PER_PARAM
  fewer = range(config.num_layers, 1, -1)
  candidates = (dataclasses.replace(config, num_layers=n) for n in fewer)
  fitting = (c for c in candidates if models.num_params(c) <= most)
  return next(fitting, dataclasses.replace(config, num_layers=1))


def _rollout(config: models.ModelConfig, sizes: Sizes) -> Rollout:
  """Random responses, four to a prompt, each with it of equal length."""
  rows, prompt = 16, sizes.prompt_length
  length = sizes.response_length - prompt
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.integers(2, config.vocab_size, shape, np.int32)
  index, ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
  each = np.zeros((rows, length), np.float32)
  return Rollout(
    prompt_tokens=np.repeat(draw(rows // 4, prompt), 4, axis=0),
    prompt_lengths=prompt * ones,
    tokens=draw(rows, length),
    lengths=length * ones,
    mask=np.ones((rows, length), bool),
    behavior_logprobs=each - np.log(np.float32(config.vocab_size)),
    version=each.astype(np.int32),
    origin=each.astype(np.int32),
    turn_rewards=each,
    status=int(Status.FINISHED) * ones,
    window_start=0 * ones,
    example_id=index // 4,
    group_id=index // 4,
    group=index // 4,
    sample_id=index,
  )


PARTS = {
  "device": measure_device,
  "agreement": measure_agreement,
  "decode": measure_decode,
  "update": measure_update,
}
