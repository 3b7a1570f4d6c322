"""The slot pool: static-shaped state of the responses being written.

A slot holds one response. All slots share the arrays below; a slot is admitted
(its context prefilled, the next token drawn), advanced token by token, and left
alone once inactive. The context is the prompt and, for a response that goes on,
what it has so far. Everything is a pure function of arrays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import models
from jaxrl_llm.models import ModelFns
from jaxrl_llm.sampling.choose import choose
from jaxrl_llm.types import Status


@chex.dataclass(frozen=True)
class Settings:
  """Sampling settings, one value per slot; a new value compiles nothing."""

  temperature: chex.Array  # float32 [S], 0 is greedy.
  top_k: chex.Array  # int32 [S], 0 is off.
  top_p: chex.Array  # float32 [S], 1 is off.
  min_p: chex.Array  # float32 [S], 0 is off.
  limit: chex.Array  # int32 [S], response tokens at which the episode ends.
  until: chex.Array  # int32 [S], those at which writing pauses, <= limit.


@chex.dataclass(frozen=True)
class Slots:
  """State of S slots with room for T response tokens each."""

  cache: tuple  # Keys and values of `bucket` positions, per layer.
  last_token: chex.Array  # int32 [S], written but not yet in the cache.
  position: chex.Array  # int32 [S], index of last_token in its sequence.
  length: chex.Array  # int32 [S], response tokens so far.
  active: chex.Array  # bool [S].
  status: chex.Array  # int32 [S], a `Status`; TRUNCATED until the end.
  sample_id: chex.Array  # int32 [S], seeds the response.
  settings: Settings
  tokens: chex.Array  # int32 [S, T].
  logprobs: chex.Array  # float32 [S, T], of the law sampled from.
  version: chex.Array  # int32 [S, T], policy version per token.


class Law(NamedTuple):
  """What all tokens of a call have in common; arrays."""

  key: chex.PRNGKey  # Of the run; see `_draw` for how it is used.
  version: chex.Array  # int32 scalar, version of the parameters.
  stop_tokens: chex.Array  # int32 [n].
  control: Any = None  # Tree of arrays for `Tempering`; None: there is none.


# (logits [S, V], temperature [S], control) -> temperature [S] of each token.
Tempering = Callable[[jax.Array, jax.Array, Any], jax.Array]


def empty(fns: ModelFns, *, slots: int, bucket: int, room: int) -> Slots:
  """A pool of idle slots with a cache of `bucket` positions."""
  # One array a field: the state is donated, and a buffer is given away once.
  ints = lambda *shape: jnp.zeros((slots, *shape), jnp.int32)
  floats = lambda *shape: jnp.zeros((slots, *shape), jnp.float32)
  ones = lambda: jnp.ones((slots,), jnp.float32)
  return Slots(
    cache=fns.init_cache(slots, bucket),
    last_token=ints(),
    position=ints(),
    length=ints(),
    active=jnp.zeros((slots,), bool),
    status=ints(),
    sample_id=ints(),
    # Idle slots sample plainly: a filter of one slot is a cost to all.
    settings=Settings(
      temperature=ones(),
      top_k=ints(),
      top_p=ones(),
      min_p=floats(),
      limit=ints(),
      until=ints(),
    ),
    tokens=ints(room),
    logprobs=floats(room),
    version=ints(room),
  )


def grow(slots: Slots, *, bucket: int) -> Slots:
  """The same slots with room for `bucket` positions in the cache."""
  return slots.replace(cache=models.grow_cache(slots.cache, bucket))


def admit(
  params,
  slots: Slots,
  law: Law,
  context_tokens: chex.Array,
  context_lengths: chex.Array,
  written: chex.Array,
  slot_index: chex.Array,
  sample_ids: chex.Array,
  settings: Settings,
  *,
  fns: ModelFns,
  tempering: Tempering | None = None,
) -> Slots:
  """Prefills contexts once each, gives each its G slots and a next token.

  Args:
    params: sampler parameters.
    slots: the pool; its cache has room for C positions.
    law: of every token of the call.
    context_tokens: int32 [N, C], right-padded: a prompt and its response so
      far. Only tokens written from now on are recorded in the pool.
    context_lengths: int32 [N].
    written: int32 [N], how many tokens of the context are response.
    slot_index: int32 [N, G], the slot of each response; S to drop it.
    sample_ids: int32 [N, G].
    settings: values [N, G].
    fns: the model.
    tempering: chooses the temperature of each token; None keeps the slot's.

  Returns:
    The pool with the admitted slots active.
  """
  group_size = slot_index.shape[1]
  where = slot_index.reshape(-1)
  logits, prefilled = fns.prefill(params, context_tokens, context_lengths)
  share = lambda x: jnp.repeat(x, group_size, axis=0)

  def put(pool, rows):
    return pool.at[where].set(rows, mode="drop")

  rows = jnp.zeros_like(where)
  flat = jax.tree.map(lambda x: x.reshape(-1), settings)
  slots = slots.replace(
    cache=models.write_cache(
      slots.cache, where, jax.tree.map(share, prefilled)
    ),
    position=put(slots.position, share(context_lengths) - 1),
    length=put(slots.length, share(written)),
    active=put(slots.active, rows == 0),
    status=put(slots.status, rows + int(Status.TRUNCATED)),
    sample_id=put(slots.sample_id, sample_ids.reshape(-1)),
    settings=jax.tree.map(put, slots.settings, flat),
  )
  # The next token of every response comes from its context's last logits.
  pool_logits = jnp.zeros((slots.active.shape[0], logits.shape[1]))
  pool_logits = put(pool_logits, share(logits))
  admitted = put(jnp.zeros_like(slots.active), rows == 0)
  return _draw(slots, pool_logits, admitted, law, tempering)


def advance(
  params,
  slots: Slots,
  law: Law,
  max_steps: chex.Array,
  *,
  fns: ModelFns,
  tempering: Tempering | None = None,
) -> Slots:
  """Decodes until no slot is active, the cache is full, or `max_steps`.

  One `while_loop` on the device; the host is not asked per token.
  """
  bucket = models.cache_length(slots.cache)

  def going(carry):
    step, slots = carry
    longest = jnp.max(jnp.where(slots.active, slots.position, -1))
    return (step < max_steps) & (longest >= 0) & (longest < bucket)

  def body(carry):
    step, slots = carry
    # An idle slot repeats its last token in place: it writes what is there.
    position = jnp.minimum(slots.position, bucket - 1)
    logits, cache = fns.decode(params, slots.cache, slots.last_token, position)
    slots = _draw(
      slots.replace(cache=cache), logits, slots.active, law, tempering
    )
    return step + 1, slots

  return jax.lax.while_loop(going, body, (jnp.int32(0), slots))[1]


def _draw(slots, logits, drawing, law, tempering):
  """Draws and records one token in every slot of the mask `drawing`.

  The randomness of a token is fold_in(fold_in(key, sample_id), token index): a
  response depends on weights, prompt and sample_id, and on nothing else.
  """
  settings = slots.settings

  def number(sample_id, index):
    sample_key = jax.random.fold_in(law.key, sample_id)
    return jax.random.uniform(jax.random.fold_in(sample_key, index))

  temperature = settings.temperature
  if tempering is not None and law.control is not None:
    temperature = tempering(logits, temperature, law.control)
  choice = choose(
    jax.vmap(number)(slots.sample_id, slots.length),
    logits,
    temperature=temperature,
    top_k=settings.top_k,
    top_p=settings.top_p,
    min_p=settings.min_p,
  )
  rows = jnp.arange(logits.shape[0])
  # Slots that do not draw write beyond the room, which is dropped.
  column = jnp.where(drawing, slots.length, slots.tokens.shape[1])
  record = lambda pool, value: pool.at[rows, column].set(value, mode="drop")
  length = slots.length + drawing
  stopped = jnp.any(choice.tokens[:, None] == law.stop_tokens[None], axis=1)
  full = length >= settings.limit
  paused = length >= settings.until  # Where full as well: until <= limit.
  status = jnp.where(
    stopped, int(Status.FINISHED), int(Status.OVERLONG)
  ).astype(jnp.int32)
  return slots.replace(
    last_token=jnp.where(drawing, choice.tokens, slots.last_token),
    position=slots.position + drawing,
    length=length,
    active=slots.active & ~(drawing & (stopped | paused)),
    status=jnp.where(drawing & (stopped | full), status, slots.status),
    tokens=record(slots.tokens, choice.tokens),
    logprobs=record(slots.logprobs, choice.logprobs),
    version=record(slots.version, jnp.broadcast_to(law.version, length.shape)),
  )
