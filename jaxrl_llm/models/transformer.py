"""The decoder over plain parameter dicts: packed rows, prefill, decode.

Layers are stacked ([L, ...] leaves) and scanned for training. The sampler uses
the same layers unrolled, each with its own KV cache, updated in place.
"""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models import heads, layers, rope
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kernels import Kernels
from jaxrl_llm.models.kv_cache import BlockTables, KVCache

Params = dict[str, Any]


@chex.dataclass(frozen=True)
class PackedRows:
  """Samples side by side in rows [R, C], which training reads."""

  tokens: chex.Array  # int32.
  segments: chex.Array  # int32; sees earlier tokens of its own; 0 is padding.
  positions: chex.Array  # int32, rotary: the index within the sample.
  prefixes: chex.Array | None = None  # int32, a segment seen too; 0 is none.
  targets: chex.Array | None = None  # int32, the next token of the same sample.
  mask: chex.Array | None = None  # bool, targets that are asked about.
  # float32, of each token when it was sampled; 0 of tokens that were given.
  logprobs: chex.Array | None = None


# What of a layer is kept for the backward pass.
REMAT_POLICIES = {
  "full": jax.checkpoint_policies.nothing_saveable,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "none": jax.checkpoint_policies.everything_saveable,
}
_PREFILL_CHUNK = 512  # Tokens of a context at a time.
# Kind -> (config, random numbers) -> the module.
_MODULES = {
  "embed": layers.Embed,
  "layer": layers.DecoderLayer,
  "norm": lambda c, rngs: layers.RMSNorm(c.hidden_size, c.rms_norm_eps),
  "head": lambda c, rngs: layers.Linear(
    c.hidden_size, c.vocab_size, bias=False, rngs=rngs
  ),
}


@functools.cache
def _graphdef(kind: str, config: ModelConfig) -> nnx.GraphDef:
  """Structure of one module, without its arrays."""
  make = lambda: _MODULES[kind](config, nnx.Rngs(0))
  return nnx.split(nnx.eval_shape(make))[0]


def _module(kind: str, config: ModelConfig, params: Params):
  return nnx.merge(_graphdef(kind, config), params)


def init(key: chex.PRNGKey, config: ModelConfig) -> Params:
  """Random parameters: float32 masters, layers stacked on axis 0."""

  def make(kind, key):
    module = _MODULES[kind](config, nnx.Rngs(key))
    return nnx.to_pure_dict(nnx.state(module))

  key_embed, key_layers, key_head = jax.random.split(key, 3)
  params = {
    "embed": make("embed", key_embed),
    "layers": jax.vmap(functools.partial(make, "layer"))(
      jax.random.split(key_layers, config.num_layers)
    ),
    "final_norm": make("norm", 0),  # Which draws nothing.
  }
  if not config.tie_word_embeddings:
    params["lm_head"] = make("head", key_head)
  return params


@functools.cache
def param_shapes(config: ModelConfig) -> Params:
  """The parameter tree with a `jax.ShapeDtypeStruct` for every leaf."""
  return jax.eval_shape(lambda: init(jax.random.key(0), config))


def num_params(config: ModelConfig) -> int:
  """The number of parameters; tied embeddings count once."""
  return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config)))


def head_kernel(params: Params, config: ModelConfig) -> jax.Array:
  """Output matrix: the embedding [V, D] if tied, else lm_head [D, V]."""
  if config.tie_word_embeddings:
    return params["embed"]["embedding"]
  return params["lm_head"]["kernel"]


def logits(
  params: Params, states: chex.Array, *, config: ModelConfig
) -> jax.Array:
  """Of final hidden states [..., D], float32 [..., V]."""
  kernel = head_kernel(params, config)
  return heads.project(states, kernel, config.tie_word_embeddings)


def hidden(
  params: Params,
  packed: PackedRows,
  extra_embeddings: chex.Array | None = None,
  *,
  config: ModelConfig,
  dtype: Any,
  remat_policy: str,
  attention: Callable[..., jax.Array],
  sharding: jax.sharding.Sharding | None = None,
) -> jax.Array:
  """Final hidden states [R, C, D] of packed rows, dealt as in `context`.

  Args:
    params: stacked parameters.
    packed: the rows.
    extra_embeddings: [R, C, D], added to those of the tokens; None: nothing is.
    config: the architecture.
    dtype: of activations and matrix products.
    remat_policy: what the backward pass computes again, one of
      `REMAT_POLICIES`.
    attention: as of `PackedAttention`.
    sharding: of the hidden states, pinned after every layer; where it splits
      the tokens of a row, they divide.
  """
  segments, prefixes = packed.segments, packed.prefixes
  if prefixes is None:
    prefixes = jnp.zeros_like(segments)
  cos, sin = _rotary(config, packed.positions)

  def pin(x):
    if sharding is None:
      return x
    return jax.lax.with_sharding_constraint(x, sharding)

  def attend(q, k, v):
    return attention(q, k, v, segments, prefixes), None

  def layer(x, layer_params):
    module = _module("layer", config, layer_params)
    return pin(module(x, cos, sin, attend)[0]), None

  policy = REMAT_POLICIES[remat_policy]
  if policy is not jax.checkpoint_policies.everything_saveable:
    layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
  x = _module("embed", config, params["embed"])(packed.tokens, dtype)
  if extra_embeddings is not None:
    x += extra_embeddings.astype(dtype)
  x = pin(x)
  x, _ = jax.lax.scan(layer, x, params["layers"])
  return _module("norm", config, params["final_norm"])(x)


def for_sampling(params: Params, *, config: ModelConfig, dtype: Any) -> Params:
  """Sampler layout: a tuple of per-layer dicts instead of stacked arrays."""
  params = jax.tree.map(lambda x: x.astype(dtype), params)
  split = lambda i: jax.tree.map(lambda x: x[i], params["layers"])
  return params | {"layers": tuple(map(split, range(config.num_layers)))}


def prefill(
  params: Params,
  tokens: chex.Array,
  *,
  config: ModelConfig,
  dtype: Any,
  cache_dtype: Any,
  kernels: Kernels,
  chunk: int = _PREFILL_CHUNK,
) -> KVCache:
  """The contiguous KV cache of right-padded contexts [N, C].

  Padding is to the right, so causality alone keeps it out of real tokens. Long
  contexts go chunk by chunk, each seeing the chunks before it, so that
  activations are those of N · chunk tokens.

  Args:
    params: sampler parameters (`for_sampling`).
    tokens: int32 [N, C].
    config: the architecture.
    dtype: of activations and matrix products.
    cache_dtype: of the result.
    kernels: attention backend, whose layout the result has.
    chunk: tokens of a context at a time.
  """
  count, length = tokens.shape
  chunk = min(chunk, length)
  chunks = -(-length // chunk)
  tokens = jnp.pad(tokens, ((0, 0), (0, chunks * chunk - length)))
  layers = range(config.num_layers)
  empty = lambda time, dtype: tuple(
    kernels.init_contiguous(count, time, dtype) for _ in layers
  )

  def write(kv_cache, index):
    start = index * chunk
    positions = start + jnp.arange(chunk)

    def attend(i, q, k, v):
      layer = kernels.write_contiguous(kv_cache[i], k, v, start)
      return kernels.prefill_attention(q, layer, start), layer

    part = jax.lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
    positions = jnp.broadcast_to(positions, (count, chunk))
    return _unrolled(params, config, part, positions, attend, dtype)[1], None

  padded = empty(chunks * chunk, dtype)
  kv_cache, _ = jax.lax.scan(write, padded, jnp.arange(chunks))
  # Without the padding of the last chunk.
  return jax.tree.map(
    lambda x, kept: x[tuple(map(slice, kept.shape))].astype(kept.dtype),
    kv_cache,
    jax.eval_shape(lambda: empty(length, cache_dtype)),
  )


def decode(
  params: Params,
  kv_cache: KVCache,
  block_tables: BlockTables,
  tokens: chex.Array,
  positions: chex.Array,
  writing: chex.Array,
  *,
  config: ModelConfig,
  dtype: Any,
  kernels: Kernels,
) -> tuple[jax.Array, KVCache]:
  """Q tokens a slot: writes their KV, attends to all of the slot up to each.

  Args:
    params: sampler parameters (`for_sampling`).
    kv_cache: paged, of all slots.
    block_tables: the pages of each slot.
    tokens: int32 [S, Q].
    positions: int32 [S, Q], index of each token in its own sequence.
    writing: bool [S, Q], False: the token leaves no trace.
    config: the architecture.
    dtype: of activations and matrix products.
    kernels: attention backend, whose layout the cache has.

  Returns:
    Logits, float32 [S, Q, V], and the cache.
  """

  def attend(i, q, k, v):
    layer = kernels.write_paged(
      kv_cache[i], k, v, block_tables, positions, writing
    )
    return kernels.paged_attention(q, layer, block_tables, positions), layer

  states, kv_cache = _unrolled(params, config, tokens, positions, attend, dtype)
  return logits(params, states, config=config), kv_cache


def _unrolled(params, config, tokens, positions, attend, dtype):
  """Layer by layer, attention knowing which; collects their caches."""
  cos, sin = _rotary(config, positions)
  x = _module("embed", config, params["embed"])(tokens, dtype)
  kv_cache = []
  for i, layer_params in enumerate(params["layers"]):
    module = _module("layer", config, layer_params)
    x, layer_cache = module(x, cos, sin, functools.partial(attend, i))
    kv_cache.append(layer_cache)
  return _module("norm", config, params["final_norm"])(x), tuple(kv_cache)


def _rotary(config, positions):
  frequencies, scale = rope.frequencies(
    config.head_dim, config.rope_theta, config.rope_scaling
  )
  return layers.rotary_tables(positions, frequencies, scale)
