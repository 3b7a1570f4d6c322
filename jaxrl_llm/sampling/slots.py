"""The slot pool: static-shaped state of the responses being written.

A slot holds one response. All slots share the arrays below; a slot is admitted
(its prompt prefilled, its first token drawn), advanced token by token, and left
alone once inactive. Everything is a pure function of arrays, so a refill, a
window or a restart is a matter of which slots are written when.
"""

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
  limit: chex.Array  # int32 [S], most response tokens.


@chex.dataclass(frozen=True)
class Slots:
  """State of S slots with room for T response tokens each."""

  cache: tuple  # Keys and values of `bucket` positions, per layer.
  last_token: chex.Array  # int32 [S], written but not yet in the cache.
  position: chex.Array  # int32 [S], index of last_token in its sequence.
  length: chex.Array  # int32 [S], response tokens so far.
  active: chex.Array  # bool [S].
  status: chex.Array  # int32 [S], a `Status`; TRUNCATED while unfinished.
  sample_id: chex.Array  # int32 [S], seeds the response.
  settings: Settings
  tokens: chex.Array  # int32 [S, T].
  logprobs: chex.Array  # float32 [S, T], of the law sampled from.
  version: chex.Array  # int32 [S, T], policy version per token.


def empty(fns: ModelFns, *, slots: int, bucket: int, room: int) -> Slots:
  """A pool of idle slots with a cache of `bucket` positions."""
  # One array a field: the state is donated, and a buffer is given away once.
  ints = lambda *shape: jnp.zeros((slots, *shape), jnp.int32)
  floats = lambda *shape: jnp.zeros((slots, *shape), jnp.float32)
  return Slots(
    cache=fns.init_cache(slots, bucket),
    last_token=ints(),
    position=ints(),
    length=ints(),
    active=jnp.zeros((slots,), bool),
    status=ints(),
    sample_id=ints(),
    settings=Settings(
      temperature=floats(),
      top_k=ints(),
      top_p=floats(),
      min_p=floats(),
      limit=ints(),
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
  key: chex.PRNGKey,
  version: chex.Array,
  stop_tokens: chex.Array,
  prompt_tokens: chex.Array,
  prompt_lengths: chex.Array,
  slot_index: chex.Array,
  sample_ids: chex.Array,
  settings: Settings,
  *,
  fns: ModelFns,
) -> Slots:
  """Prefills prompts once each, gives each its G slots and a first token.

  Args:
    params: sampler parameters.
    slots: the pool; its cache has room for P positions.
    key: key of the run; see `_draw` for how it is used.
    version: int32 scalar, version of `params`.
    stop_tokens: int32 [n].
    prompt_tokens: int32 [N, P], right-padded.
    prompt_lengths: int32 [N].
    slot_index: int32 [N, G], the slot of each response; S to drop it.
    sample_ids: int32 [N, G].
    settings: values [N, G].
    fns: the model.

  Returns:
    The pool with the admitted slots active.
  """
  group_size = slot_index.shape[1]
  where = slot_index.reshape(-1)
  logits, prefilled = fns.prefill(params, prompt_tokens, prompt_lengths)
  share = lambda x: jnp.repeat(x, group_size, axis=0)

  def put(pool, rows):
    return pool.at[where].set(rows, mode="drop")

  rows = jnp.zeros_like(where)
  flat = jax.tree.map(lambda x: x.reshape(-1), settings)
  slots = slots.replace(
    cache=models.write_cache(
      slots.cache, where, jax.tree.map(share, prefilled)
    ),
    position=put(slots.position, share(prompt_lengths) - 1),
    length=put(slots.length, rows),
    active=put(slots.active, rows == 0),
    status=put(slots.status, rows + int(Status.TRUNCATED)),
    sample_id=put(slots.sample_id, sample_ids.reshape(-1)),
    settings=jax.tree.map(put, slots.settings, flat),
  )
  # The first token of every response comes from its prompt's last logits.
  pool_logits = jnp.zeros((slots.active.shape[0], logits.shape[1]))
  pool_logits = put(pool_logits, share(logits))
  admitted = put(jnp.zeros_like(slots.active), rows == 0)
  return _draw(slots, pool_logits, admitted, key, version, stop_tokens)


def advance(
  params,
  slots: Slots,
  key: chex.PRNGKey,
  version: chex.Array,
  stop_tokens: chex.Array,
  max_steps: chex.Array,
  *,
  fns: ModelFns,
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
      slots.replace(cache=cache),
      logits,
      slots.active,
      key,
      version,
      stop_tokens,
    )
    return step + 1, slots

  return jax.lax.while_loop(going, body, (jnp.int32(0), slots))[1]


def _draw(slots, logits, drawing, key, version, stop_tokens):
  """Draws and records one token in every slot of the mask `drawing`.

  The randomness of a token is fold_in(fold_in(key, sample_id), token index): a
  response depends on weights, prompt and sample_id, and on nothing else.
  """
  settings = slots.settings

  def number(sample_id, index):
    token_key = jax.random.fold_in(jax.random.fold_in(key, sample_id), index)
    return jax.random.uniform(token_key)

  choice = choose(
    jax.vmap(number)(slots.sample_id, slots.length),
    logits,
    temperature=settings.temperature,
    top_k=settings.top_k,
    top_p=settings.top_p,
    min_p=settings.min_p,
  )
  rows = jnp.arange(logits.shape[0])
  # Slots that do not draw write beyond the room, which is dropped.
  column = jnp.where(drawing, slots.length, slots.tokens.shape[1])
  record = lambda pool, value: pool.at[rows, column].set(value, mode="drop")
  length = slots.length + drawing
  stopped = jnp.any(choice.tokens[:, None] == stop_tokens[None], axis=1)
  full = length >= settings.limit
  status = jnp.where(
    stopped, int(Status.FINISHED), int(Status.OVERLONG)
  ).astype(jnp.int32)
  return slots.replace(
    last_token=jnp.where(drawing, choice.tokens, slots.last_token),
    position=slots.position + drawing,
    length=length,
    active=slots.active & ~(drawing & (stopped | full)),
    status=jnp.where(drawing & (stopped | full), status, slots.status),
    tokens=record(slots.tokens, choice.tokens),
    logprobs=record(slots.logprobs, choice.logprobs),
    version=record(slots.version, jnp.broadcast_to(version, length.shape)),
  )
