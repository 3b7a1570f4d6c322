"""An arithmetic model whose greedy responses can be computed by hand.

It has the interface of a language model and reads all of its inputs from the KV
cache, so that a misplaced page changes the output. The first token of a prompt
is the length of the whole sequence; every token but the last depends on all
tokens before it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from helpers import tiny, tiny_engine

from jaxrl_llm import models, sharding
from jaxrl_llm.models import paged_attention
from jaxrl_llm.sampling import Engine, EngineConfig, SamplingSettings
from jaxrl_llm.types import Status

STOP, FIRST = 2, 3  # The stop token, and the first other one.
P, T = 6, 50
GREEDY = SamplingSettings(temperature=0.0)
VOCAB = tiny.tiny_config().vocab_size


def _following(total):
  return FIRST + total % (VOCAB - FIRST)


def _decode(params, kv_cache, block_tables, tokens, positions, writing):
  """Sums (token + 1)(position + 1) over the tokens in the pages of a slot."""
  del params
  k = tokens[:, :, None, None].astype(jnp.float32)
  layer = paged_attention.write_paged(
    kv_cache[0], k, k, block_tables, positions, writing
  )
  keys = jnp.concatenate([keys for keys, _ in layer], axis=1)[:, :, 0, 0]
  keys = keys[:, : block_tables.page_owner.shape[1]]  # Pages to read.
  share = tokens.shape[0] // keys.shape[0]

  def of_shard(keys, owner, start, positions):
    index = start[:, None] + jnp.arange(keys.shape[1])[None]
    seen = index <= positions[jnp.minimum(owner, share - 1), 0][:, None]
    parts = jnp.stack(
      [
        jnp.where(seen, (keys + 1) * (index + 1), 0).sum(axis=1),
        jnp.where(index == 0, keys, 0).sum(axis=1),
      ]
    )
    return jax.vmap(lambda x: jax.ops.segment_sum(x, owner, share))(parts)

  local = lambda x: x.reshape(keys.shape[0], share, *x.shape[1:])
  total, length = (
    jax.vmap(of_shard, out_axes=1)(
      keys, block_tables.page_owner, block_tables.page_start, local(positions)
    )
    .reshape(2, -1)
    .astype(jnp.int32)
  )
  last = positions[:, 0] + 2 >= length
  token = jnp.where(last, STOP, _following(total))
  return jax.nn.one_hot(token, VOCAB)[:, None], (layer,)


def _prefill(params, tokens):
  del params
  rows = tokens.astype(jnp.float32)[:, None]
  return ((rows[:, :, None], rows[..., None]),)


def _init_kv_cache(shards, pages, page_size):
  half = pages // 2
  ones = lambda count, *shape: jnp.ones((shards, count, 1, *shape))
  segment = lambda n: (ones(n, 1, page_size), ones(n, page_size, 1))
  return ((segment(half), segment(pages - half)),)


def make_engine(mesh=None, **settings):
  dealt = mesh and sharding.slot_sharding(mesh, 1)  # One KV head.
  fns = models.make_policy(tiny.tiny_config(), sampler_sharding=dealt)
  fns = fns._replace(
    init_kv_cache=_init_kv_cache, prefill=_prefill, decode=_decode
  )
  config = EngineConfig(
    max_prompt_length=P, max_response_length=T, stop_tokens=[STOP], **settings
  )
  return Engine(fns, config)


@functools.cache
def engine():
  """A shared engine with sixteen slots and small pages."""
  return make_engine(slots=16, page_size=8)


def prompt(total, seed):
  """Makes a prompt of random length for a sequence of `total` tokens."""
  rng = np.random.default_rng(seed)
  most = min(P, total - 1)
  rest = rng.integers(FIRST, VOCAB, rng.integers(0, most))
  return [total, *rest.tolist()]


def generate(prompts, own=None, **more):
  """Generates one response per prompt."""
  call = {"settings": GREEDY, "key": jax.random.key(0)} | more
  ids = np.arange(len(prompts))[:, None]
  return tiny_engine.write(own or engine(), (), prompts, ids, **call)


def response(prompt):
  """Returns the expected tokens and status."""
  sequence = list(prompt)
  while len(sequence) < len(prompt) + T:
    if len(sequence) + 1 >= prompt[0]:
      return [*sequence[len(prompt) :], STOP], Status.FINISHED
    total = sum((t + 1) * (i + 1) for i, t in enumerate(sequence))
    sequence.append(_following(total))
  return sequence[len(prompt) :], Status.OVERLONG


def check(rollout, prompts):
  """Checks that every row is the expected response to its prompt."""
  assert len(rollout.lengths) == len(prompts)
  for i, given in enumerate(prompts):
    tokens, status = response(given)
    length = rollout.lengths[i]
    assert rollout.tokens[i, :length].tolist() == tokens, f"row {i}"
    assert rollout.status[i] == status, f"row {i}"
