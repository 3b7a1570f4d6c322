"""The engine: drives the slot pool from the host and returns a Rollout."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import ModelFns
from jaxrl_llm.sampling import slots as slots_lib
from jaxrl_llm.types import Origin, Rollout

_SMALLEST_BUCKET = 16


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
  """How to sample; plain numbers that become arrays, so nothing recompiles.

  Attributes:
    temperature: divides the logits; 0 is greedy.
    top_k: keep the k most likely tokens; 0 is off.
    top_p: keep the smallest set with this mass; 1 is off.
    min_p: keep tokens with at least this share of the best one; 0 is off.
    max_new_tokens: most response tokens, at most the engine's room.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  max_new_tokens: int | None = None


class Engine:
  """A pool of slots with compiled `admit` and `advance`.

  Responses of one prompt share one prefill. Key-value memory and the cost of
  attention follow the longest sequence at hand: the cache grows through a
  ladder of lengths.
  """

  def __init__(
    self,
    fns: ModelFns,
    *,
    slots: int,
    max_prompt_length: int,
    max_response_length: int,
    stop_tokens: Sequence[int],
    sharding: jax.sharding.Sharding | None = None,
  ):
    """Makes the engine; nothing is compiled or allocated yet.

    Args:
      fns: the model.
      slots: responses written at a time, S.
      max_prompt_length: longest prompt in tokens, P.
      max_response_length: room for a response in tokens, T.
      stop_tokens: any of these ends a response (and is part of it).
      sharding: of the slot axis, for every array of the pool.
    """
    if min(slots, max_prompt_length, max_response_length) < 1:
      raise ValueError(
        "slots, max_prompt_length and max_response_length must be >= 1, got"
        f" {slots}, {max_prompt_length}, {max_response_length}"
      )
    self.fns = fns
    self.slots = slots
    self.max_prompt_length = max_prompt_length
    self.room = max_response_length
    self._stop = np.asarray(list(stop_tokens) or [-1], np.int32)
    total = max_prompt_length + max_response_length
    self._buckets = _ladder(total)
    self._empty = jax.jit(
      functools.partial(slots_lib.empty, fns, slots=slots, room=self.room),
      static_argnames="bucket",
      out_shardings=sharding,
    )
    self._grow = jax.jit(slots_lib.grow, static_argnames="bucket")
    self._admit = jax.jit(
      functools.partial(slots_lib.admit, fns=fns), donate_argnums=1
    )
    self._advance = jax.jit(
      functools.partial(slots_lib.advance, fns=fns), donate_argnums=1
    )

  def generate(
    self,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    sample_ids: chex.Array,
    key: chex.PRNGKey,
    settings: SamplingSettings,
    version: int = 0,
    prompt_ids: Sequence[int] | None = None,
  ) -> Rollout:
    """Writes G responses to each of N prompts.

    Args:
      params: sampler parameters (`fns.for_sampling`).
      prompts: N token sequences, none empty or over `max_prompt_length`.
      sample_ids: int [N, G], unique per response; with `key` they fix its
        randomness.
      key: a key that stays the same for the whole run.
      settings: how to sample.
      version: policy version of `params`, recorded with every token.
      prompt_ids: N numbers recorded in the rollout; positions by default.

    Returns:
      A `Rollout` of NumPy arrays with B = N·G rows, groups consecutive.

    Raises:
      ValueError: a prompt or setting is out of range.
    """
    sample_ids = np.asarray(sample_ids, np.int32)
    limit = self._check(prompts, sample_ids, settings)
    group_size = sample_ids.shape[1]
    per_wave = max(1, self.slots // group_size)
    waves = []
    for start in range(0, len(prompts), per_wave):
      stop = min(start + per_wave, len(prompts))
      waves.append(
        self._wave(
          params,
          prompts[start:stop],
          sample_ids[start:stop],
          per_wave,
          key,
          settings,
          limit,
          version,
        )
      )
    ids = np.arange(len(prompts)) if prompt_ids is None else prompt_ids
    return self._rollout(prompts, sample_ids, np.asarray(ids, np.int32), waves)

  def lower(self, params: Any, *, prompts: int, group_size: int) -> dict:
    """Lowers `admit` and `advance` at their largest shapes, running nothing.

    Args:
      params: ShapeDtypeStructs of sampler parameters.
      prompts: prompts of one wave.
      group_size: responses per prompt.

    Returns:
      name -> `jax.stages.Lowered`.
    """
    shape = jax.ShapeDtypeStruct
    pool = jax.eval_shape(
      functools.partial(self._empty, bucket=self._buckets[-1])
    )
    key = jax.eval_shape(jax.random.key, 0)
    number = shape((), jnp.int32)
    common = (params, pool, key, number, shape(self._stop.shape, jnp.int32))
    grid = (prompts, group_size)
    ids, floats = shape(grid, jnp.int32), shape(grid, jnp.float32)
    settings = slots_lib.Settings(
      temperature=floats, top_k=ids, top_p=floats, min_p=floats, limit=ids
    )
    tokens = shape((prompts, self.max_prompt_length), jnp.int32)
    lengths = shape((prompts,), jnp.int32)
    return {
      "sampler admit": self._admit.lower(
        *common, tokens, lengths, ids, ids, settings
      ),
      "sampler advance": self._advance.lower(*common, number),
    }

  def _check(self, prompts, sample_ids, settings):
    """Refuses what is out of range; returns the limit of response tokens."""
    if sample_ids.ndim != 2 or sample_ids.shape[0] != len(prompts):
      raise ValueError(
        f"sample_ids must be [N, G] for N = {len(prompts)} prompts, got shape"
        f" {sample_ids.shape}"
      )
    if min(sample_ids.shape) < 1 or sample_ids.shape[1] > self.slots:
      raise ValueError(
        f"there must be prompts, and 1..{self.slots} responses to each (a group"
        f" fits the slots), got sample_ids of shape {sample_ids.shape}"
      )
    lengths = [len(p) for p in prompts]
    if min(lengths) < 1 or max(lengths) > self.max_prompt_length:
      raise ValueError(
        f"prompt lengths must be 1..{self.max_prompt_length}, got"
        f" {min(lengths)}..{max(lengths)}"
      )
    limit = settings.max_new_tokens
    limit = self.room if limit is None else limit
    for name, value, valid, allowed in (
      ("max_new_tokens", limit, 1 <= limit <= self.room, f"1..{self.room}"),
      (
        "temperature",
        settings.temperature,
        0 <= settings.temperature < np.inf,
        "finite and >= 0",
      ),
      ("top_k", settings.top_k, settings.top_k >= 0, ">= 0"),
      ("top_p", settings.top_p, 0 < settings.top_p <= 1, "in (0, 1]"),
      ("min_p", settings.min_p, 0 <= settings.min_p < 1, "in [0, 1)"),
    ):
      if not valid:
        raise ValueError(f"{name} must be {allowed}, got {value}")
    return limit

  def _wave(
    self, params, prompts, sample_ids, width, key, settings, limit, version
  ):
    """Fills the pool once and decodes until every slot has ended."""
    count, group_size = sample_ids.shape
    longest = max(len(p) for p in prompts)
    span = min(self._bucket(longest), self.max_prompt_length)
    tokens = np.zeros((width, span), np.int32)
    lengths = np.ones((width,), np.int32)
    index = np.full((width, group_size), self.slots, np.int32)
    ids = np.zeros((width, group_size), np.int32)
    for i, prompt in enumerate(prompts):
      tokens[i, : len(prompt)] = prompt
      lengths[i] = len(prompt)
    index[:count] = np.arange(count * group_size).reshape(count, group_size)
    ids[:count] = sample_ids
    full = lambda value, dtype: np.full(index.shape, value, dtype)
    values = slots_lib.Settings(
      temperature=full(settings.temperature, np.float32),
      top_k=full(settings.top_k, np.int32),
      top_p=full(settings.top_p, np.float32),
      min_p=full(settings.min_p, np.float32),
      limit=full(limit, np.int32),
    )
    version = np.int32(version)
    pool = self._empty(bucket=self._bucket(longest + 1))
    pool = self._admit(
      params,
      pool,
      key,
      version,
      self._stop,
      tokens,
      lengths,
      index,
      ids,
      values,
    )
    while True:
      pool = self._advance(
        params, pool, key, version, self._stop, np.int32(self.room)
      )
      active, position = jax.device_get((pool.active, pool.position))
      if not active.any():
        break
      pool = self._grow(pool, bucket=self._bucket(position[active].max() + 1))
    kept = ("tokens", "logprobs", "version", "length", "status")
    arrays = jax.device_get({name: pool[name] for name in kept})
    return {k: v[: count * group_size] for k, v in arrays.items()}

  def _bucket(self, length: int) -> int:
    return next(b for b in self._buckets if b >= length)

  def _rollout(self, prompts, sample_ids, prompt_ids, waves) -> Rollout:
    group_size = sample_ids.shape[1]
    joined = {k: np.concatenate([w[k] for w in waves]) for k in waves[0]}
    tokens = np.zeros((len(prompts), self.max_prompt_length), np.int32)
    for i, prompt in enumerate(prompts):
      tokens[i, : len(prompt)] = prompt
    share = lambda x: np.repeat(x, group_size, axis=0)
    lengths = joined["length"]
    mask = np.arange(self.room)[None] < lengths[:, None]
    return Rollout(
      prompt_tokens=share(tokens),
      prompt_lengths=share(np.asarray([len(p) for p in prompts], np.int32)),
      tokens=joined["tokens"],
      lengths=lengths,
      mask=mask,
      behavior_logprobs=joined["logprobs"],
      version=joined["version"],
      origin=np.full(mask.shape, int(Origin.POLICY), np.int32),
      status=joined["status"],
      window_start=np.zeros_like(lengths),
      prompt_id=share(prompt_ids),
      group=share(np.arange(len(prompts), dtype=np.int32)),
      sample_id=sample_ids.reshape(-1),
    )


def _ladder(total: int) -> list[int]:
  """Lengths 16, 24, 32, 48, 64, 96, ... below total, then total itself."""
  steps = itertools.count()
  powers = (_SMALLEST_BUCKET << i for i in steps)
  rungs = (rung for power in powers for rung in (power, power * 3 // 2))
  return [*itertools.takewhile(lambda rung: rung < total, rungs), total]
