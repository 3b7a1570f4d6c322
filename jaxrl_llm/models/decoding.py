"""The decoder of the sampler: prefill and decode with a KV cache.

Runs the layers of `transformer` unrolled. Each has its own KV cache, which is
updated in place.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import chex
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.models import context, experts, transformer
from jaxrl_llm.models.backends import Kernels, platform_of
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kv_cache import BlockTables, KVCache
from jaxrl_llm.models.layers import AttentionKind
from jaxrl_llm.models.numerics import Numerics
from jaxrl_llm.models.params import merge
from jaxrl_llm.models.transformer import Params

_PREFILL_CHUNK = 512  # Tokens of each context per chunk.


@dataclasses.dataclass(frozen=True, eq=False)
class SamplerModel:
  """The decoder with the settings of a sampler.

  Attributes:
    config: the architecture.
    numerics: how weights and cache are stored, and how products are computed.
    kernels: attention backend of each kind of attention. Backends determine the
      layout of the cache, which is the same for all.
    choices: shape and dtype of a token's expert choices, which `decode` then
      also returns; None: no choices are returned.
  """

  config: ModelConfig
  numerics: Numerics
  kernels: Mapping[AttentionKind, Kernels]
  choices: jax.ShapeDtypeStruct | None = None

  @property
  def backend(self) -> Kernels:
    """The backend of the first layer."""
    return self.kernels[self.config.layers[0].attention]

  def init_kv_cache(self, shards: int, pages: int, page_size: int) -> KVCache:
    """Makes the paged cache of every layer."""
    return tuple(
      self.kernels[kind.attention].init_paged(
        shards, pages, page_size, self.numerics.kv
      )
      for kind in self.config.layers
    )

  def for_sampling(self, params: Params) -> Params:
    """Converts parameters to the sampler's layout: a tuple of per-layer dicts.

    On a CPU, an embedding of 16-bit floats is stored as integers, because XLA
    would convert the entire table to float32 in every call. A tied head is
    stored separately as [D, V], because XLA would transpose it in every call.
    Adapters stay separate from the base, so that only they change.

    Args:
      params: stacked parameters, as one tree or as two (`params.Params`).
    """
    params = merge(params)
    layers = transformer.places(self.config)
    stacked, period = [params[place] for place in layers], len(layers)

    def layer(i: int):
      taken = jax.tree.map(lambda x: x[i // period], stacked[i % period])
      return self.numerics.store_layer(taken)

    params = {k: x for k, x in params.items() if k not in layers}
    params = self.numerics.store(params)
    table = params["embed"]["embedding"]
    platform = platform_of(self.backend.kv_sharding)
    if platform == "cpu" and table.dtype.itemsize == 2:
      bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
      params |= {"embed": {"embedding": bits}}
      if self.config.tie_word_embeddings:
        params["lm_head"] = {"kernel": table.T}
    return params | {"layers": tuple(map(layer, range(self.config.num_layers)))}

  def prefill(self, params: Params, tokens: chex.Array) -> KVCache:
    """Computes the contiguous KV cache of right-padded contexts [N, C].

    Padding is on the right, where causal attention ignores it. Long contexts
    are processed in chunks, to limit activations to those of N · chunk tokens.

    Args:
      params: sampler parameters (`for_sampling`).
      tokens: int32 [N, C].
    """
    kernels, numerics = self.kernels, self.numerics
    count, length = tokens.shape
    chunk = min(_PREFILL_CHUNK, length)
    chunks = -(-length // chunk)
    tokens = jnp.pad(tokens, ((0, 0), (0, chunks * chunk - length)))
    empty = lambda time, dtype: tuple(
      kernels[kind.attention].init_contiguous(count, time, dtype)
      for kind in self.config.layers
    )

    def write(kv_cache: KVCache, index: Array):
      start = index * chunk
      positions = start + jnp.arange(chunk)

      def attend(i: int, kind: AttentionKind, q: Array, k: Array, v: Array):
        k, v = map(numerics.to_cache, (k, v))
        layer = kernels[kind].write_contiguous(kv_cache[i], k, v, start)
        return kernels[kind].prefill_attention(q, layer, start), layer

      part = jax.lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
      positions = jnp.broadcast_to(positions, (count, chunk))
      return self._unrolled(params, part, positions, attend)[1], None

    padded = empty(chunks * chunk, numerics.activations)
    kv_cache, _ = jax.lax.scan(write, padded, jnp.arange(chunks))
    # Drop the padding of the last chunk.
    return jax.tree.map(
      lambda x, kept: x[tuple(map(slice, kept.shape))].astype(kept.dtype),
      kv_cache,
      jax.eval_shape(lambda: empty(length, numerics.kv)),
    )

  def decode(
    self,
    params: Params,
    kv_cache: KVCache,
    block_tables: BlockTables,
    tokens: chex.Array,
    positions: chex.Array,
    writing: chex.Array,
  ) -> tuple:
    """Decodes Q tokens per slot: writes their KV, then attends causally.

    Args:
      params: sampler parameters (`for_sampling`).
      kv_cache: the paged cache of all slots.
      block_tables: the pages of each slot.
      tokens: int32 [S, Q].
      positions: int32 [S, Q], index of each token in its own sequence.
      writing: bool [S, Q], tokens to write; other tokens leave the cache as is.

    Returns:
      Logits, float32 [S, Q, V], the updated cache and, if `choices` is set, the
      expert choices of all layers, int [S, Q, layers · k].
    """

    def attend(i: int, kind: AttentionKind, q: Array, k: Array, v: Array):
      backend = self.kernels[kind]
      k, v = map(self.numerics.to_cache, (k, v))
      layer = backend.write_paged(
        kv_cache[i], k, v, block_tables, positions, writing
      )
      return backend.paged_attention(q, layer, block_tables, positions), layer

    states, kv_cache, chosen = self._unrolled(params, tokens, positions, attend)
    found = transformer.logits(params, states, self.config), kv_cache
    if self.choices is None:
      return found
    return *found, jnp.concatenate(chosen, axis=-1).astype(self.choices.dtype)

  def _unrolled(
    self, params: Params, tokens: Array, positions: Array, attend: Callable
  ):
    """Runs the layers one by one; collects their caches and expert choices.

    Experts have no capacity limit: a response must not depend on others.
    """
    config, numerics = self.config, self.numerics
    place = self.backend.kv_sharding
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
