"""The engine: drives the slot pool from the host and returns a Rollout.

Rows of a rollout go in, each new or cut, and come out written on. Writing whole
responses is the case in which every row is new and the window never closes.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import models
from jaxrl_llm.models import ModelFns
from jaxrl_llm.sampling import rows as rows_lib
from jaxrl_llm.sampling import slots as slots_lib
from jaxrl_llm.sampling.settings import SamplingSettings, limit_of
from jaxrl_llm.types import Rollout

_SMALLEST_BUCKET = 16
_CUT_SHARE = 8  # Of so many slots one is prefilled at a time if it goes on.


class _Call(NamedTuple):
  """What all rows of a call have in common."""

  params: Any
  key: chex.PRNGKey
  version: int
  settings: SamplingSettings
  limit: int  # Response tokens at which the episode ends.
  window: int  # Most new tokens of a response.
  group_size: int  # Most new responses of a prompt.
  control: Any = None  # What the engine's tempering goes by.


class Engine:
  """A pool of slots with compiled `admit` and `advance`.

  New responses of one prompt share one prefill. Key-value memory and the cost
  of attention follow the longest sequence at hand: the cache grows through a
  ladder of lengths, and shapes depend on nothing but the rung.
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
    tempering: slots_lib.Tempering | None = None,
  ):
    """Makes the engine; nothing is compiled or allocated yet.

    Args:
      fns: the model.
      slots: responses written at a time, S.
      max_prompt_length: longest prompt in tokens, P.
      max_response_length: room for a response in tokens, T.
      stop_tokens: any of these ends a response (and is part of it).
      sharding: of the slot axis, for every array of the pool.
      tempering: (logits [S, V], temperature [S], control) -> temperature [S]
        of each token; None keeps the temperature of the settings.
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
    self._sharding = sharding
    shards = slots // sharding.shard_shape((slots,))[0] if sharding else 1
    # Cut rows prefilled at a time: they divide over devices as the slots do.
    self._cut_rows = shards * max(1, slots // (_CUT_SHARE * shards))
    self._empty = jax.jit(
      functools.partial(slots_lib.empty, fns, slots=slots, room=self.room),
      static_argnames="bucket",
      out_shardings=sharding,
    )
    self._grow = jax.jit(slots_lib.grow, static_argnames="bucket")
    law = {"fns": fns, "tempering": tempering}
    self._admit = jax.jit(
      functools.partial(slots_lib.admit, **law), donate_argnums=1
    )
    self._advance = jax.jit(
      functools.partial(slots_lib.advance, **law), donate_argnums=1
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
    control: Any = None,
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
      control: tree of arrays for the engine's tempering; None: no tempering.

    Returns:
      A `Rollout` of NumPy arrays with B = N·G rows, groups consecutive.

    Raises:
      ValueError: a prompt or setting is out of range.
    """
    sample_ids = np.asarray(sample_ids, np.int32)
    self._check_grid(prompts, sample_ids)
    limit = limit_of(settings, room=self.room)
    rows_lib.check_prompts(prompts, width=self.max_prompt_length)
    group_size = sample_ids.shape[1]
    prompt_ids = np.arange(len(prompts)) if prompt_ids is None else prompt_ids
    rows = self._new_rows(prompts, sample_ids, prompt_ids)
    call = _Call(
      params, key, version, settings, limit, limit, group_size, control
    )
    waves = rows_lib.split(rows, self._prompts(group_size) * group_size)
    return rows_lib.join([self._write(wave, call) for wave in waves])

  def generate_window(
    self,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    unfinished: Rollout | None,
    sample_ids: Sequence[chex.Array],
    prompt_ids: Sequence[int],
    group_size: int,
    window: int,
    key: chex.PRNGKey,
    settings: SamplingSettings,
    version: int,
    control: Any = None,
  ) -> Rollout:
    """Writes at most `window` tokens: cut responses go on, new ones start.

    Keys and values of a cut response are rebuilt with `params`, so its new
    tokens are on-policy given the old ones. With unchanged parameters it equals
    the response that was never cut. All rows are in the pool at once.

    Args:
      params: sampler parameters (`fns.for_sampling`).
      prompts: N prompts of new responses, may be none.
      unfinished: rows that an earlier window cut, or None.
      sample_ids: for each prompt int [g], 1 <= g <= group_size: a prompt may
        start some of its responses now and others later.
      prompt_ids: N different numbers recorded in the rollout.
      group_size: most responses of a prompt, the same in every call of a run:
        slots // group_size prompts are prefilled at a time.
      window: most new tokens of a response in this call.
      key: a key that stays the same for the whole run.
      settings: how to sample; `max_new_tokens` is over all windows.
      version: policy version of `params`, recorded with every new token.
      control: tree of arrays for the engine's tempering; None: no tempering.

    Returns:
      A `Rollout` of NumPy arrays: the unfinished rows in their order, then the
      new ones. `window_start` is the length before the call, what was written
      before it is as it was, and a row that the window cut is TRUNCATED. Rows
      of equal `prompt_id` have equal `group`, by first appearance.

    Raises:
      ValueError: a row, prompt or setting is out of range.

    Reference:
      Fan et al. 2025, Truncated PPO, arXiv 2506.15050 (windowed rollouts).
    """
    limit = limit_of(settings, room=self.room)
    if window < 1:
      raise ValueError(f"window must be >= 1, got {window}")
    if not 1 <= group_size <= self.slots:
      raise ValueError(
        f"group_size must be 1..{self.slots} (the slots), got {group_size}"
      )
    rows_lib.check_new(prompts, sample_ids, prompt_ids, group_size=group_size)
    rows_lib.check_prompts(prompts, width=self.max_prompt_length)
    rows = self._new_rows(prompts, sample_ids, prompt_ids)
    if unfinished is not None:
      unfinished = jax.device_get(unfinished)
      rows_lib.check_unfinished(
        unfinished, width=self.max_prompt_length, room=self.room, limit=limit
      )
      rows = rows_lib.join([unfinished, rows])
    rows_lib.check_all(rows, slots=self.slots)
    rows = rows.replace(group=rows_lib.groups_of(rows.prompt_id))
    call = _Call(
      params, key, version, settings, limit, window, group_size, control
    )
    return self._write(rows, call)

  def lower(
    self,
    params: Any,
    *,
    prompts: int,
    group_size: int,
    window: bool = False,
    control: Any = None,
  ) -> dict:
    """Lowers `admit` and `advance` at their largest shapes, running nothing.

    Args:
      params: ShapeDtypeStructs of sampler parameters.
      prompts: prompts of one wave.
      group_size: responses per prompt.
      window: lower the prefill of cut responses too.
      control: as in `generate`, or its ShapeDtypeStructs.

    Returns:
      name -> `jax.stages.Lowered`.
    """
    shape = jax.ShapeDtypeStruct
    pool = jax.eval_shape(
      functools.partial(self._empty, bucket=self._buckets[-1])
    )
    key = jax.eval_shape(jax.random.key, 0)
    number = shape((), jnp.int32)
    stop = shape(self._stop.shape, jnp.int32)
    common = (params, pool, slots_lib.Law(key, number, stop, control))
    call = _Call(
      params, key, 0, SamplingSettings(), self.room, self.room, group_size
    )
    none = self._new_rows([], [], [])

    def admit(grid, span, sharding):
      batch = rows_lib.lay_out(none, [], grid, span, self.slots)
      tokens = shape(batch.tokens.shape, jnp.int32, sharding=sharding)
      batch = batch._replace(tokens=tokens)
      return self._admit.lower(*common, *batch, _settings(batch, call))

    lowered = {
      "sampler admit": admit(
        (prompts, group_size), self.max_prompt_length, None
      ),
      "sampler advance": self._advance.lower(*common, number),
    }
    if window:
      lowered["sampler admit cut responses"] = admit(
        (self._cut_rows, 1), self._buckets[-1], self._sharding
      )
    return lowered

  def _check_grid(self, prompts, sample_ids):
    """Refuses sample ids that are not [N, G] with G responses in the slots."""
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

  def _new_rows(self, prompts, sample_ids, prompt_ids) -> Rollout:
    return rows_lib.new_rows(
      prompts,
      sample_ids,
      prompt_ids,
      width=self.max_prompt_length,
      room=self.room,
    )

  def _write(self, rows: Rollout, call: _Call) -> Rollout:
    """Writes every row on, all in one pool, until each has ended or paused."""
    version = np.int32(call.version)
    law = slots_lib.Law(call.key, version, self._stop, call.control)
    pool = None
    for longest, batch in self._batches(rows, call):
      pool = self._with_room(pool, longest + 1)
      pool = self._admit(call.params, pool, law, *batch)
    while True:
      pool = self._advance(call.params, pool, law, np.int32(self.room))
      active, position = jax.device_get((pool.active, pool.position))
      if not active.any():
        break
      pool = self._with_room(pool, position[active].max() + 1)
    kept = ("tokens", "logprobs", "version", "length", "status")
    arrays = jax.device_get({name: pool[name] for name in kept})
    arrays = {name: x[: len(rows.lengths)] for name, x in arrays.items()}
    column = np.arange(self.room)[None]
    earlier = column < rows.lengths[:, None]
    return rows.replace(
      tokens=np.where(earlier, rows.tokens, arrays["tokens"]),
      lengths=arrays["length"],
      mask=column < arrays["length"][:, None],
      behavior_logprobs=np.where(
        earlier, rows.behavior_logprobs, arrays["logprobs"]
      ),
      version=np.where(earlier, rows.version, arrays["version"]),
      status=arrays["status"],
      window_start=rows.lengths,
    )

  def _batches(self, rows: Rollout, call: _Call) -> list[tuple[int, tuple]]:
    """(longest context, arguments of `admit`), the shortest batch first.

    So the cache of the pool fits the batch at hand, and there are as many
    programs as rungs, not as pairs of a batch's rung and a pool's.
    """
    new, cut = rows_lib.sharing_context(rows)
    grid = (self._prompts(call.group_size), call.group_size)
    batches = []
    for longest, part in rows_lib.chunks(rows, new, grid[0]):
      span = min(self._bucket(longest), self.max_prompt_length)
      batch = rows_lib.lay_out(rows, part, grid, span, self.slots)
      batches.append((longest, (*batch, _settings(batch, call))))
    grid = (self._cut_rows, 1)
    for longest, part in rows_lib.chunks(rows, cut, grid[0]):
      span = self._bucket(longest + 1)
      batch = rows_lib.lay_out(rows, part, grid, span, self.slots)
      tokens = jax.device_put(batch.tokens, self._sharding)
      batch = batch._replace(tokens=tokens)
      batches.append((longest, (*batch, _settings(batch, call))))
    return sorted(batches, key=lambda batch: batch[0])

  def _with_room(self, pool, length: int):
    """The pool, made or grown rung by rung, with `length` positions."""
    bucket = self._bucket(length)
    if pool is None:
      return self._empty(bucket=bucket)
    for rung in self._buckets:
      if models.cache_length(pool.cache) < rung <= bucket:
        pool = self._grow(pool, bucket=rung)
    return pool

  def _prompts(self, group_size: int) -> int:
    """Prompts prefilled at a time."""
    return max(1, self.slots // group_size)

  def _bucket(self, length: int) -> int:
    return next(b for b in self._buckets if b >= length)


def _settings(batch: rows_lib.Contexts, call: _Call) -> slots_lib.Settings:
  """The settings of a call for each response of a batch."""
  settings, shape = call.settings, batch.slot_index.shape
  floats = lambda value: np.full(shape, value, np.float32)
  ints = lambda value: np.full(shape, value, np.int32)
  until = np.minimum(batch.written + call.window, call.limit)
  return slots_lib.Settings(
    temperature=floats(settings.temperature),
    top_k=ints(settings.top_k),
    top_p=floats(settings.top_p),
    min_p=floats(settings.min_p),
    limit=ints(call.limit),
    until=ints(until[:, None]),
  )


def _ladder(total: int) -> list[int]:
  """Lengths 16, 24, 32, 48, 64, 96, ... below total, then total itself."""
  steps = itertools.count()
  powers = (_SMALLEST_BUCKET << i for i in steps)
  rungs = (rung for power in powers for rung in (power, power * 3 // 2))
  return [*itertools.takewhile(lambda rung: rung < total, rungs), total]
