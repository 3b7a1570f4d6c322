"""The decoder as the sampler runs it: prefill and decode with a KV cache.

The layers are those of `transformer`, unrolled, each with its own KV cache,
updated in place.
"""

import functools
from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.models import context, experts, transformer
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kernels import Kernels, platform_of
from jaxrl_llm.models.kv_cache import BlockTables, KVCache
from jaxrl_llm.models.layers import AttentionKind
from jaxrl_llm.models.numerics import Numerics
from jaxrl_llm.models.transformer import Params

KernelsByKind = Mapping[AttentionKind, Kernels]


def for_sampling(
  params: Params,
  *,
  config: ModelConfig,
  numerics: Numerics,
  kernels: KernelsByKind,
) -> Params:
  """Converts parameters to the sampler's layout: a tuple of per-layer dicts.

  On a CPU, an embedding of 16-bit floats is stored as integers, because XLA
  would convert the whole table to float32 in every call. A tied head is stored
  beside it as [D, V], because XLA would transpose it in every call. Adapters
  stay beside the base, so that they alone change.

  Args:
    params: stacked parameters.
    config: the architecture.
    numerics: how the result is stored.
    kernels: attention backends, with the sampler's devices.
  """
  layers = transformer.places(config)
  stacked, period = [params[place] for place in layers], len(layers)

  def layer(i):
    taken = jax.tree.map(lambda x: x[i // period], stacked[i % period])
    return numerics.store_layer(taken)

  params = {k: x for k, x in params.items() if k not in layers}
  params = numerics.store(params)
  table = params["embed"]["embedding"]
  place = kernels[config.layers[0].attention].kv_sharding
  if platform_of(place) == "cpu" and table.dtype.itemsize == 2:
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
    params |= {"embed": {"embedding": bits}}
    if config.tie_word_embeddings:
      params["lm_head"] = {"kernel": table.T}
  return params | {"layers": tuple(map(layer, range(config.num_layers)))}


def prefill(
  params: Params,
  tokens: chex.Array,
  *,
  config: ModelConfig,
  numerics: Numerics,
  kernels: KernelsByKind,
  chunk: int = 512,
) -> KVCache:
  """Computes the contiguous KV cache of right-padded contexts [N, C].

  Padding is on the right, where causal attention ignores it. Long contexts are
  processed in chunks, so that activations are those of N · chunk tokens.

  Args:
    params: sampler parameters (`for_sampling`).
    tokens: int32 [N, C].
    config: the architecture.
    numerics: dtypes and products.
    kernels: attention backends, which choose the layout of the result.
    chunk: tokens per context and chunk.
  """
  count, length = tokens.shape
  chunk = min(chunk, length)
  chunks = -(-length // chunk)
  tokens = jnp.pad(tokens, ((0, 0), (0, chunks * chunk - length)))
  empty = lambda time, dtype: tuple(
    kernels[kind.attention].init_contiguous(count, time, dtype)
    for kind in config.layers
  )

  def write(kv_cache, index):
    start = index * chunk
    positions = start + jnp.arange(chunk)

    def attend(i, kind, q, k, v):
      k, v = map(numerics.to_cache, (k, v))
      layer = kernels[kind].write_contiguous(kv_cache[i], k, v, start)
      return kernels[kind].prefill_attention(q, layer, start), layer

    part = jax.lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
    positions = jnp.broadcast_to(positions, (count, chunk))
    given = part, positions, attend, kernels
    return _unrolled(params, config, numerics, *given)[1], None

  padded = empty(chunks * chunk, numerics.activations)
  kv_cache, _ = jax.lax.scan(write, padded, jnp.arange(chunks))
  # Without the padding of the last chunk.
  return jax.tree.map(
    lambda x, kept: x[tuple(map(slice, kept.shape))].astype(kept.dtype),
    kv_cache,
    jax.eval_shape(lambda: empty(length, numerics.kv)),
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
  numerics: Numerics,
  kernels: KernelsByKind,
  choices: bool = False,
) -> tuple:
  """Decodes Q tokens per slot: writes their KV, then attends causally.

  Args:
    params: sampler parameters (`for_sampling`).
    kv_cache: the paged cache of all slots.
    block_tables: the pages of each slot.
    tokens: int32 [S, Q].
    positions: int32 [S, Q], index of each token in its own sequence.
    writing: bool [S, Q]; other tokens leave no trace.
    config: the architecture.
    numerics: dtypes and products.
    kernels: attention backends, which choose the layout of the cache.
    choices: also return the experts of each token.

  Returns:
    Logits, float32 [S, Q, V], the cache, and with `choices` those of all
    layers, int [S, Q, layers · k].
  """

  def attend(i, kind, q, k, v):
    backend = kernels[kind]
    k, v = map(numerics.to_cache, (k, v))
    layer = backend.write_paged(
      kv_cache[i], k, v, block_tables, positions, writing
    )
    return backend.paged_attention(q, layer, block_tables, positions), layer

  given = tokens, positions, attend, kernels
  states, kv_cache, chosen = _unrolled(params, config, numerics, *given)
  found = transformer.logits(params, states), kv_cache
  if not choices:
    return found
  dtype = experts.choices_shape(config).dtype
  return *found, jnp.concatenate(chosen, axis=-1).astype(dtype)


def _unrolled(params, config, numerics, tokens, positions, attend, kernels):
  """Runs the layers one by one; collects their caches and choices of experts.

  No expert has a capacity: a response must not depend on others.
  """
  place = kernels[config.layers[0].attention].kv_sharding
  routing = experts.Routing(sharding=context.leading(place, 1))
  rotary = transformer.rotary_tables(config, positions)
  x = transformer.embed(params, tokens, config, numerics)
  kv_cache, choices = [], []
  for i, kind in enumerate(config.layers):
    module = transformer.make_module(
      kind, config, numerics, params["layers"][i]
    )
    x, layer_cache, aux = module(
      x, rotary[kind.attention], functools.partial(attend, i), routing
    )
    kv_cache.append(layer_cache)
    choices += [aux[experts.CHOICES]] if experts.CHOICES in aux else []
  x = transformer.final_norm(params, x, config, numerics)
  return x, tuple(kv_cache), choices
