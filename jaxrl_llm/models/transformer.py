"""The decoder over plain parameter dicts: packed rows, prefill, decode.

Layers are stacked ([L, ...] leaves) and scanned for training. The sampler uses
the same layers unrolled, with one KV array a layer, which XLA updates in place.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models import layers
from jaxrl_llm.models.attention import decode_attention, packed_attention
from jaxrl_llm.models.config import ModelConfig, rope_frequencies

Params = dict[str, Any]
# One (keys [S, K, d, L], values [S, K, L, d]) pair a layer for S slots, K heads
# and L positions. With L last, the product with a query runs along memory: on a
# CPU attention of a decode step took half the time of [S, K, L, d] keys.
Cache = tuple[tuple[jax.Array, jax.Array], ...]


@functools.cache
def _graphdef(kind: str, config: ModelConfig) -> nnx.GraphDef:
  """Structure of one module, without its arrays."""
  makers = {
    "layer": lambda: layers.DecoderLayer(config, rngs=nnx.Rngs(0)),
    "norm": lambda: layers.RMSNorm(
      config.hidden_size, epsilon=config.rms_norm_eps
    ),
    "embed": lambda: layers.Embed(config, rngs=nnx.Rngs(0)),
  }
  return nnx.split(nnx.eval_shape(makers[kind]))[0]


def _module(kind: str, config: ModelConfig, params: Params):
  return nnx.merge(_graphdef(kind, config), params)


def init(key: chex.PRNGKey, config: ModelConfig) -> Params:
  """Random parameters: float32 masters, layers stacked on axis 0."""

  def pure(module):
    return nnx.to_pure_dict(nnx.state(module))

  key_embed, key_layers, key_head = jax.random.split(key, 3)
  one_layer = lambda k: pure(layers.DecoderLayer(config, rngs=nnx.Rngs(k)))
  params = {
    "embed": pure(layers.Embed(config, rngs=nnx.Rngs(key_embed))),
    "layers": jax.vmap(one_layer)(
      jax.random.split(key_layers, config.num_layers)
    ),
    "final_norm": pure(
      layers.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps)
    ),
  }
  if not config.tie_word_embeddings:
    head = layers.Linear(
      config.hidden_size,
      config.vocab_size,
      bias=False,
      rngs=nnx.Rngs(key_head),
    )
    params["lm_head"] = pure(head)
  return params


def head_kernel(params: Params, config: ModelConfig) -> jax.Array:
  """Output matrix: the embedding [V, D] if tied, else lm_head [D, V]."""
  if config.tie_word_embeddings:
    return params["embed"]["embedding"]
  return params["lm_head"]["kernel"]


def hidden(
  params: Params,
  config: ModelConfig,
  tokens: chex.Array,
  segments: chex.Array,
  positions: chex.Array,
  prefixes: chex.Array | None = None,
  *,
  dtype: Any,
  remat: bool,
  sharding: jax.sharding.Sharding | None = None,
) -> jax.Array:
  """Final hidden states [B, T, D] of packed rows.

  Args:
    params: stacked parameters.
    config: the architecture.
    tokens: int32 [B, T].
    segments: int32 [B, T]; a token sees earlier tokens of its own segment.
      0 marks padding.
    positions: int32 [B, T], rotary position.
    prefixes: int32 [B, T], a further segment that each token sees, 0 for none.
    dtype: of activations and matrix products.
    remat: recompute each layer in the backward pass.
    sharding: of the hidden states, pinned after every layer.
  """
  if prefixes is None:
    prefixes = jnp.zeros_like(segments)
  cos, sin = _rotary(config, positions)
  pin = _pin(sharding)

  def attend(q, k, v):
    return packed_attention(q, k, v, segments, prefixes), None

  def layer(x, layer_params):
    module = _module("layer", config, layer_params)
    return pin(module(x, cos, sin, attend)[0]), None

  if remat:
    layer = jax.checkpoint(layer, prevent_cse=False)
  x = pin(_module("embed", config, params["embed"])(tokens, dtype))
  x, _ = jax.lax.scan(layer, x, params["layers"])
  return _module("norm", config, params["final_norm"])(x)


def unstack(params: Params, config: ModelConfig) -> Params:
  """Sampler layout: a tuple of per-layer dicts instead of stacked arrays."""
  split = lambda i: jax.tree.map(lambda x: x[i], params["layers"])
  return params | {"layers": tuple(map(split, range(config.num_layers)))}


def init_cache(
  config: ModelConfig, slots: int, length: int, dtype: Any
) -> Cache:
  """Zero keys and values, one pair a layer."""
  kv_heads, size = config.num_kv_heads, config.head_dim
  return tuple(
    (
      jnp.zeros((slots, kv_heads, size, length), dtype),
      jnp.zeros((slots, kv_heads, length, size), dtype),
    )
    for _ in range(config.num_layers)
  )


def grow_cache(cache: Cache, length: int) -> Cache:
  """The same cache with room for `length` positions."""

  def pad(x, axis):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)

  return tuple((pad(keys, 3), pad(values, 2)) for keys, values in cache)


def write_cache(cache: Cache, slots: chex.Array, rows: Cache) -> Cache:
  """Puts the first positions of `rows` into the given slots of a cache.

  Args:
    cache: the pool.
    slots: int32 [B], target of each row; out of range drops the row.
    rows: a cache of B slots and no more positions than the pool.
  """
  span = rows[0][1].shape[2]
  return tuple(
    (
      keys.at[slots, :, :, :span].set(new_keys, mode="drop"),
      values.at[slots, :, :span].set(new_values, mode="drop"),
    )
    for (keys, values), (new_keys, new_values) in zip(cache, rows)
  )


def cache_length(cache: Cache) -> int:
  """Positions there is room for."""
  return cache[0][1].shape[2]


def prefill(
  params: Params, config: ModelConfig, tokens: chex.Array, *, dtype: Any
) -> tuple[jax.Array, Cache]:
  """Hidden states and cache of right-padded prompts [N, P].

  Padding is to the right, so causality alone keeps it out of real tokens.
  """
  one = jnp.ones_like(tokens)  # A single segment a row.
  positions = jnp.cumsum(one, axis=1) - 1

  def attend(q, k, v):
    out = packed_attention(q, k, v, one, jnp.zeros_like(one))
    return out, (k.transpose(0, 2, 3, 1), v.swapaxes(1, 2))

  return _unrolled(
    params, config, tokens, positions, lambda _: attend, dtype=dtype
  )


def decode(
  params: Params,
  config: ModelConfig,
  cache: Cache,
  tokens: chex.Array,
  positions: chex.Array,
  *,
  dtype: Any,
) -> tuple[jax.Array, Cache]:
  """One token a slot: writes its KV at `positions`, attends to all before.

  Args:
    params: unstacked parameters (`unstack`).
    config: the architecture.
    cache: keys and values of the slots.
    tokens: int32 [S].
    positions: int32 [S], index of each token in its own sequence.
    dtype: of activations and matrix products.

  Returns:
    Final hidden states [S, D] and the cache.
  """
  slots = jnp.arange(tokens.shape[0])
  visible = jnp.arange(cache_length(cache))[None] <= positions[:, None]

  def attend_with(i):
    def attend(q, k, v):
      keys, values = cache[i]
      keys = keys.at[slots, :, :, positions].set(k[:, 0].astype(keys.dtype))
      values = values.at[slots, :, positions].set(v[:, 0].astype(values.dtype))
      out = decode_attention(q[:, 0], keys, values, visible)
      return out[:, None], (keys, values)

    return attend

  x, cache = _unrolled(
    params,
    config,
    tokens[:, None],
    positions[:, None],
    attend_with,
    dtype=dtype,
  )
  return x[:, 0], cache


def _unrolled(params, config, tokens, positions, attend_with, *, dtype):
  """Layer by layer with an attention of its own each; collects memories."""
  cos, sin = _rotary(config, positions)
  x = _module("embed", config, params["embed"])(tokens, dtype)
  memories = []
  for i, layer_params in enumerate(params["layers"]):
    module = _module("layer", config, layer_params)
    x, memory = module(x, cos, sin, attend_with(i))
    memories.append(memory)
  return _module("norm", config, params["final_norm"])(x), tuple(memories)


def _rotary(config, positions):
  frequencies, scale = rope_frequencies(config)
  return layers.rotary_tables(positions, frequencies, scale)


def _pin(sharding):
  if sharding is None:
    return lambda x: x
  return lambda x: jax.lax.with_sharding_constraint(x, sharding)
