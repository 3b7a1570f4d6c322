"""Device programs of the engine: prefill, extend and decode; pure functions.

Only the KV cache stays on the device between calls. A slot is one row of the
decode batch; its per-request state is passed in with every call. The host
allocates pages of the cache (`scheduler`).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import BlockTables, ModelFns
from jaxrl_llm.sampling.choose import choose
from jaxrl_llm.sampling.processors import (
  BUILT_IN,
  Distribution,
  LogitsProcessor,
  TokenContext,
)
from jaxrl_llm.sampling.speculation import Drafter
from jaxrl_llm.types import Status


@chex.dataclass(frozen=True)
class Slots:
  """The responses in S slots; new sampling settings do not recompile."""

  last_token: chex.Array  # int32 [S], not yet in the cache.
  position: chex.Array  # int32 [S], index of last_token in its sequence.
  length: chex.Array  # int32 [S], response tokens up to last_token.
  sample_id: chex.Array  # int32 [S], seeds the response.
  # int32 [S, C], tokens of the sequence, for drafters and exact decoding only;
  # otherwise C is 0.
  history: chex.Array
  temperature: chex.Array  # float32 [S], 0 is greedy.
  top_k: chex.Array  # int32 [S], 0 is off.
  top_p: chex.Array  # float32 [S], 1 is off.
  min_p: chex.Array  # float32 [S], 0 is off.
  min_tokens: chex.Array  # int32 [S], minimum tokens before a stop token.
  max_tokens: chex.Array  # int32 [S], length at which the episode ends.
  pause_at: chex.Array  # int32 [S], length that ends the window, <= max_tokens.
  # int32 [S], tokens of `history` that are read before any is drawn; None if
  # all but the last one are in the cache.
  known: chex.Array | None = None


class SamplingMetadata(NamedTuple):
  """Sampling parameters shared by all tokens of a call; arrays."""

  # uint32 [2], the run's key as data on the host: JAX cannot copy an array of
  # this process to a mesh whose only device is another process's.
  key: chex.Array
  stop_tokens: chex.Array  # int32 [n].
  states: Mapping[str, Any]  # States of logits processors by name.


class DecodeOutput(NamedTuple):
  """The output of S slots in one call, at most W tokens each."""

  tokens: jax.Array  # int32 [S, W], left-aligned.
  logprobs: jax.Array  # float32 [S, W], under the distribution sampled from.
  count: jax.Array  # int32 [S], number of tokens.
  steps: jax.Array  # int32 [S], decode steps that drew them.
  active: jax.Array  # bool [S], may continue.
  status: jax.Array  # int32 [S], a `Status`; TRUNCATED if it has not ended.
  # int [S, W, layers · k], experts of the positions that predicted the tokens.
  choices: jax.Array | None = None


# Logits processors by name, in order of application; hashable.
Processors = tuple[tuple[str, LogitsProcessor], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ModelRunner:
  """The functions of a model and its drafter that an engine compiles.

  Attributes:
    fns: the model.
    drafter: proposes draft tokens.
    processors: logits processors in addition to the built-in ones.
    tokens_per_call: new tokens of a slot after which a decode call returns.
  """

  fns: ModelFns
  drafter: Drafter
  processors: Processors
  tokens_per_call: int

  def prefill(self, params: tuple[Any, Any], tokens: chex.Array) -> tuple:
    """Returns the contiguous KV of contexts [N, C], a drafter's layers last.

    `models.write_pages` inserts it into pages. The last token of a context is
    read by the first decode step.
    """
    kv_cache = self.fns.prefill(params[0], tokens)
    return kv_cache + self.drafter.prefill(params[1], tokens)

  def extend(
    self,
    params: tuple[Any, Any],
    kv_cache: tuple,
    block_tables: BlockTables,
    tokens: chex.Array,
    positions: chex.Array,
    writing: chex.Array,
  ) -> tuple:
    """Appends Q given tokens of R responses to the KV cache; arrays [R, Q].

    The drafter's cache lacks them: its drafts get worse, but responses do not
    change.
    """
    layers = self.fns.config.num_layers
    kv_cache, drafter_cache = kv_cache[:layers], kv_cache[layers:]
    _, kv_cache, *_ = self.fns.decode(
      params[0], kv_cache, block_tables, tokens, positions, writing
    )
    return kv_cache + drafter_cache

  def decode(
    self,
    params: tuple[Any, Any],
    kv_cache: tuple,
    block_tables: BlockTables,
    slots: Slots,
    active: chex.Array,
    metadata: SamplingMetadata,
    min_active: chex.Array,
    *,
    num_draft_tokens: int,
  ) -> tuple[tuple, DecodeOutput]:
    """Decodes in all active slots until one has `tokens_per_call` new tokens.

    This is a single `while_loop` on the device, which returns early when fewer
    than `min_active` slots are active.

    With speculation, a step reads the last token of a slot together with its
    draft tokens. The model's own token is drawn at each of them as usual, with
    the random number of its index, and draft tokens are accepted for as long as
    they equal the tokens drawn. A response is therefore the same with any
    drafter, or with none.

    Known tokens are read one per step. The output includes them, with the
    log-probs at which they would have been drawn.

    Args:
      params: parameters of the sampler and of the drafter.
      kv_cache: KV cache of all responses, in slots or not.
      block_tables: block tables; active slots have pages for W more tokens.
      slots: S slots.
      active: bool [S], slots to decode.
      metadata: sampling parameters shared by all tokens of the call.
      min_active: int32 scalar, >= 1.
      num_draft_tokens: draft tokens per step; 0 is plain decoding. The output
        has W = tokens_per_call + num_draft_tokens columns.

    Reference:
      Leviathan et al. 2023, Fast inference from transformers via speculative
      decoding, arXiv 2211.17192; here a shared random number replaces the
      ratio.
    """
    fns, most, count = self.fns, self.tokens_per_call, num_draft_tokens
    layers = fns.config.num_layers

    def unfinished(carry):
      *_, output = carry
      longest = jnp.max(jnp.where(output.active, output.count, 0))
      return (longest < most) & (jnp.sum(output.active) >= min_active)

    def step(carry):
      """Drafts, reads, draws and records."""
      kv_cache, slots, output = carry
      kv_cache, drafter_cache = kv_cache[:layers], kv_cache[layers:]
      draw = functools.partial(self._sample, slots, metadata)
      tokens = slots.last_token[:, None]
      if count:
        draft_tokens, drafter_cache = self.drafter.propose(
          params[1],
          drafter_cache,
          block_tables,
          slots,
          output.active,
          lambda logits, ahead: draw(logits, ahead).tokens,
          count=count,
        )
        tokens = jnp.append(tokens, draft_tokens, axis=1)
      ahead = jnp.arange(count + 1)[None]
      logits, kv_cache, *experts = fns.decode(
        params[0],
        kv_cache,
        block_tables,
        jnp.maximum(tokens, 0),  # No draft token (-1) is read as token 0.
        slots.position[:, None] + ahead,
        jnp.broadcast_to(output.active[:, None], tokens.shape),
      )
      ahead = jnp.broadcast_to(ahead, tokens.shape)
      choice = draw(logits, ahead, _known_next(slots))
      accepted = tokens[:, 1:] == choice.tokens[:, :-1]  # Never true for -1.
      slots, output = _record(
        slots, output, choice, accepted, experts, metadata
      )
      return kv_cache + drafter_cache, slots, output

    output = _empty_output(active, most + count, fns.choices)
    kv_cache, _, output = jax.lax.while_loop(
      unfinished, step, (kv_cache, slots, output)
    )
    return kv_cache, output

  def _sample(self, slots, metadata, logits, ahead, known=None):
    """Draws tokens at indices length + ahead [S, Q] from logits [S, Q, V].

    The random key of a token is fold_in(fold_in(key, sample_id), token index):
    a response depends on weights, prompt and sample_id, and on nothing else.
    `known` tokens are used instead of drawn ones.
    """
    shape, key = ahead.shape, jax.random.wrap_key_data(metadata.key)
    index = (slots.length[:, None] + ahead).reshape(-1)
    per_token = functools.partial(jnp.repeat, repeats=shape[1])

    @jax.vmap
    def draw(sample_id, index):
      sample_key = jax.random.fold_in(key, sample_id)
      return jax.random.uniform(jax.random.fold_in(sample_key, index))

    uniform = draw(per_token(slots.sample_id), index)
    settings = (per_token(slots[name]) for name in Distribution._fields[1:])
    distribution = Distribution(logits.reshape(-1, logits.shape[-1]), *settings)
    context = TokenContext(
      index, per_token(slots.min_tokens), metadata.stop_tokens
    )
    states = metadata.states
    for name, processor in (*BUILT_IN.items(), *self.processors):
      if name in states or not processor.stateful:
        distribution = processor.fn(distribution, context, states.get(name))
      if not isinstance(distribution, Distribution):
        raise InputError(
          f"logits processor {name!r} returned {distribution!r}; return a"
          " distribution, such as distribution._replace(logits=logits)"
        )
    choice = choose(
      uniform, distribution, given=known, sharding=self.fns.slots_sharding
    )
    return jax.tree.map(lambda x: x.reshape(shape), choice)


def _empty_output(active, columns, choices):
  """Returns the `DecodeOutput` of S slots before the first step."""
  tokens = jnp.zeros((active.shape[0], columns), jnp.int32)
  zero = jnp.zeros(active.shape, jnp.int32)
  if choices is not None:
    choices = jnp.zeros((*tokens.shape, *choices.shape), choices.dtype)
  return DecodeOutput(
    *(tokens, tokens.astype(jnp.float32), zero, zero, active),
    *(zero + int(Status.TRUNCATED), choices),
  )


def _known_next(slots):
  """Returns the known token after the one that is read, or -1; int32 [S]."""
  if slots.known is None:
    return None
  after = slots.position + 1
  token = jnp.take_along_axis(slots.history, after[:, None], 1, mode="clip")
  return jnp.where(after < slots.known, token[:, 0], -1)


def _record(slots, output, choice, accepted, experts, metadata):
  """Records the new tokens of a step: 1 to Q of the Q tokens drawn for a slot.

  A token counts if every draft token before it was accepted and none of these
  ended the response or its window. Known stop tokens end nothing: they are part
  of the prompt, an observation, or a response that is scored.
  """
  active = output.active
  rows, ahead = jnp.arange(active.shape[0]), jnp.arange(accepted.shape[1] + 1)
  length = slots.length[:, None] + 1 + ahead[None]  # Including the token.
  stopped = jnp.any(
    choice.tokens[:, :, None] == metadata.stop_tokens[None, None], axis=2
  )
  overlong = length >= slots.max_tokens[:, None]
  paused = length >= slots.pause_at[:, None]  # True if overlong is.
  if slots.known is not None:
    stopped &= (slots.position + 1 >= slots.known)[:, None]
  goes_on = ~(stopped | paused)
  counts = jnp.cumprod(accepted & goes_on[:, :-1], axis=1)
  new = jnp.where(active, 1 + jnp.sum(counts, axis=1), 0)
  last = jnp.maximum(new - 1, 0)

  def at_last(x):
    return jnp.take_along_axis(x, last[:, None], axis=1)[:, 0]

  def write(array, start, values):
    # Tokens that do not count go to a nonexistent column and are dropped.
    column = jnp.where(
      ahead[None] < new[:, None], start[:, None] + ahead[None], array.shape[1]
    )
    return array.at[rows[:, None], column].set(values, mode="drop")

  status = jnp.where(
    at_last(stopped), int(Status.FINISHED), int(Status.OVERLONG)
  ).astype(jnp.int32)
  ended = active & at_last(stopped | overlong)
  slots = slots.replace(
    last_token=jnp.where(active, at_last(choice.tokens), slots.last_token),
    position=slots.position + new,
    length=slots.length + new,
    history=write(slots.history, slots.position + 1, choice.tokens),
  )
  return slots, DecodeOutput(
    tokens=write(output.tokens, output.count, choice.tokens),
    logprobs=write(output.logprobs, output.count, choice.logprobs),
    count=output.count + new,
    steps=output.steps + active,
    active=active & at_last(goes_on),
    status=jnp.where(ended, status, output.status),
    choices=write(output.choices, output.count, *experts) if experts else None,
  )
