"""The border of the models: named tuples of pure functions over plain dicts."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.models import context, heads, transformer
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kernels import make_kernels, make_packed_attention
from jaxrl_llm.models.kv_cache import KVCache
from jaxrl_llm.models.params import merge
from jaxrl_llm.models.transformer import PackedRows

_MAX_SURPRISE = 8.0  # Nats: beyond, an embedding would outgrow all others.


class ModelFns(NamedTuple):
  """A language model as pure functions of `params`, a plain nested dict.

  `params` below is the stacked layout that trains and is stored, whole or in
  two trees (`Params`); functions of the sampler take `sampler_params`, made
  from it by `for_sampling`.
  """

  config: ModelConfig
  # (key) -> params, float32.
  init: Callable[..., Any]
  # (params, PackedRows, temperature=1) -> (heads.TokenLogprobs of the targets,
  #  auxiliary losses of the model itself by name, which training adds).
  logprobs: Callable[..., tuple[heads.TokenLogprobs, dict[str, jax.Array]]]
  # (params, tokens [B,T], mask [B,T]) -> float32 [B,T,V]; tests and Colabs.
  logits: Callable[..., jax.Array]
  # (params) -> sampler_params, in the sampler's dtype and layout.
  for_sampling: Callable[..., Any]
  # Of every array of the paged KV cache; None: they lie on one device.
  kv_sharding: NamedSharding | None
  # Several slots may read a page of it.
  shares_pages: bool
  # Packed samples may share their prompt, see `PackedAttention`.
  shares_prompts: bool
  # (shards, pages, page_size) -> a paged KV cache of zeros.
  init_kv_cache: Callable[..., KVCache]
  # (sampler_params, tokens [N,C]) -> the contiguous KV cache of N contexts.
  prefill: Callable[..., KVCache]
  # (sampler_params, kv_cache, BlockTables, tokens [S,Q], positions [S,Q],
  #  writing [S,Q]) -> (logits [S,Q,V], kv_cache).
  decode: Callable[..., tuple[jax.Array, KVCache]]

  @property
  def slots_sharding(self) -> NamedSharding | None:
    """Of arrays [S, ...] of the sampler; None: they lie on one device."""
    return _leading(self.kv_sharding, 1)


class ValueFns(NamedTuple):
  """A critic: the same backbone with a scalar head."""

  config: ModelConfig
  # (key) -> params, float32.
  init: Callable[..., Any]
  # (policy params) -> params: a copy of its backbone, a fresh head.
  from_policy: Callable[..., Any]
  # (params, PackedRows) -> (float32 [R, C], auxiliary losses likewise).
  values: Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
  # As of the policy.
  shares_prompts: bool


def _leading(sharding: NamedSharding | None, axes: int) -> NamedSharding | None:
  """The same along the first axes alone."""
  if sharding is None:
    return None
  return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:axes]))


def _make_backbone(config, *, dtype, remat_policy, kernels, sharding):
  """`transformer.hidden` of these settings, and whether it sees prefixes."""
  packed = make_packed_attention(kernels, config, sharding=sharding)
  backbone = functools.partial(
    transformer.hidden,
    config=config,
    dtype=dtype,
    remat_policy=remat_policy,
    attention=packed.attend,
    sharding=_leading(sharding, 2),
  )
  return backbone, packed.sees_prefixes


def _logits(params, tokens, mask, *, config, backbone, parts):
  params, segments = merge(params), mask.astype(jnp.int32)
  positions = jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)
  packed = PackedRows(tokens=tokens, segments=segments, positions=positions)
  states = backbone(params, context.deal(packed, parts))
  states = context.collect(states, parts, tokens.shape[1])
  return transformer.logits(params, states, config=config)


def _init_surprise(embedding):
  """The embedding of one nat, float32 [D]: half as long as a token's.

  A direction of its own, the same in every run. From zeros it was learned too,
  but on the embedded task a dozen training steps late.
  """
  direction = jax.random.normal(jax.random.key(0), embedding.shape[1:])
  return 0.5 * jnp.std(embedding) * direction


def _embed_surprise(params, logprobs):
  """Of log-probs [R, C] in nats, [R, C, D]."""
  nats = jnp.minimum(-logprobs, _MAX_SURPRISE)
  return nats[..., None] * params["surprise"]["kernel"][None, None]


def _init_kv_cache(layers, init_layer, dtype, shards, pages, page_size):
  """A tuple of so many layers."""
  size = shards, pages, page_size
  return tuple(init_layer(*size, dtype) for _ in range(layers))


# The same functions for equal settings, so that what is compiled of them is
# found again.
@functools.lru_cache(maxsize=16)
def make_policy(
  config: ModelConfig,
  *,
  dtype: Any = jnp.float32,
  sampler_dtype: Any = None,
  cache_dtype: Any = None,
  remat_policy: str = "full",
  head_chunk: int = 128,
  head_sharding: NamedSharding | None = None,
  sharding: NamedSharding | None = None,
  kernels: str = "auto",
  sampler_sharding: NamedSharding | None = None,
) -> ModelFns:
  """Language model of a config.

  Args:
    config: the architecture.
    dtype: of activations and matrix products in training. Parameters stay
      float32.
    sampler_dtype: of parameters, activations and matrix products in the
      sampler; `dtype` if None. (Another one than the trainer's makes the
      sampler's log-probs differ from the trainer's by its rounding.)
    cache_dtype: of the KV cache; `sampler_dtype` if None.
      (On a CPU a bfloat16 cache is several times slower than a float32 one.)
    remat_policy: what the backward pass computes again, one of
      `transformer.REMAT_POLICIES`.
    head_chunk: positions of time per application of the vocabulary head.
    head_sharding: as of `heads.chunked_logprobs`.
    sharding: of keys in training, see `sharding.of_keys`; None: all lie on
      one device.
    kernels: attention backend, one of `kernels.NAMES`.
    sampler_sharding: of the sampler's slots and KV heads, see
      `sharding.of_slots`; None: all lie on one device.

  Raises:
    InputError: this backend cannot serve this model on these devices.
  """
  backbone, sees_prefixes = _make_backbone(
    config,
    dtype=dtype,
    remat_policy=remat_policy,
    kernels=kernels,
    sharding=sharding,
  )
  backend = make_kernels(kernels, config, sharding=sampler_sharding)
  sampled = {"config": config, "dtype": sampler_dtype or dtype}
  cached = sampled | {"kernels": backend}
  cache_dtype = cache_dtype or sampled["dtype"]
  parts = context.ways(sharding, 1)  # Of a row.

  def logprobs(params, packed, temperature=1.0):
    length, packed = packed.tokens.shape[1], context.deal(packed, parts)
    params = merge(params)
    of_tokens = backbone(params, packed), packed.targets, packed.mask
    states, targets, mask = (context.as_rows(x, parts) for x in of_tokens)
    scored = heads.chunked_logprobs(
      states,
      transformer.head_kernel(params, config),
      targets,
      mask,
      temperature,
      tied=config.tie_word_embeddings,
      chunk=head_chunk,
      sharding=head_sharding,
    )
    of_rows = (context.of_rows(x, parts) for x in scored)
    scored = (context.collect(x, parts, length) for x in of_rows)
    return heads.TokenLogprobs(*scored), {}

  bind = functools.partial
  return ModelFns(
    config=config,
    init=bind(transformer.init, config=config),
    logprobs=logprobs,
    logits=bind(_logits, config=config, backbone=backbone, parts=parts),
    for_sampling=lambda params: transformer.for_sampling(
      merge(params), **sampled
    ),
    kv_sharding=backend.kv_sharding,
    shares_pages=backend.shares_pages,
    shares_prompts=sees_prefixes,
    init_kv_cache=bind(
      _init_kv_cache, config.num_layers, backend.init_paged, cache_dtype
    ),
    prefill=bind(transformer.prefill, cache_dtype=cache_dtype, **cached),
    decode=bind(transformer.decode, **cached),
  )


@functools.lru_cache(maxsize=16)
def make_value(
  config: ModelConfig,
  *,
  dtype: Any = jnp.float32,
  remat_policy: str = "full",
  kernels: str = "auto",
  sharding: NamedSharding | None = None,
  reads_logprobs: bool = False,
) -> ValueFns:
  """Critic of a config: backbone plus a float32 scalar head that starts at 0.

  Args:
    config, dtype, remat_policy, kernels, sharding: as in `make_policy`.
    reads_logprobs: it also reads how surprising each token was to the policy
      that wrote it, `PackedRows.logprobs`. What the policy takes for a slip is
      known to its last layer alone, which no critic made of its layers sees.
  """
  backbone, sees_prefixes = _make_backbone(
    config,
    dtype=dtype,
    remat_policy=remat_policy,
    kernels=kernels,
    sharding=sharding,
  )
  parts = context.ways(sharding, 1)

  def from_policy(params):
    """A zero head, so that the first values are 0 and unbiased by scale."""
    head = {
      "kernel": jnp.zeros((config.hidden_size, 1), jnp.float32),
      "bias": jnp.zeros((1,), jnp.float32),
    }
    params = merge(params)
    trunk = {k: v for k, v in params.items() if k != "lm_head"}
    own = {"value_head": head}
    if reads_logprobs:
      own["surprise"] = {"kernel": _init_surprise(params["embed"]["embedding"])}
    return jax.tree.map(jnp.copy, trunk) | own

  def init(key: chex.PRNGKey):
    return from_policy(transformer.init(key, config))

  def values(params, packed):
    length, packed = packed.tokens.shape[1], context.deal(packed, parts)
    params = merge(params)
    extra = _embed_surprise(params, packed.logprobs) if reads_logprobs else None
    states = backbone(params, packed, extra).astype(jnp.float32)
    head = params["value_head"]
    values = (jnp.dot(states, head["kernel"]) + head["bias"][0])[..., 0]
    return context.collect(values, parts, length), {}

  return ValueFns(config, init, from_policy, values, sees_prefixes)
