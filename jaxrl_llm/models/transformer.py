"""The decoder as functions of plain parameter dicts: packed, prefill, decode.

Layer kinds repeat with a period, of one layer if all are alike. Training scans
over periods, and the parameters of each layer of a period are stacked. The
sampler unrolls the same layers, each with its own KV cache, updated in place.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from jaxrl_llm.errors import check_number
from jaxrl_llm.models import adapters, context, experts, heads, rope
from jaxrl_llm.models import layers as layers_lib
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kernels import Kernels, platform_of
from jaxrl_llm.models.kv_cache import BlockTables, KVCache
from jaxrl_llm.models.layers import AttentionKind
from jaxrl_llm.models.numerics import FLOAT32, Numerics

Params = dict[str, Any]
KernelsByKind = Mapping[AttentionKind, Kernels]


@chex.dataclass(frozen=True)
class PackedRows:
  """Samples packed into rows [R, C], for training.

  With a `count`, micro-batches of such rows, [M, R, C].
  """

  tokens: chex.Array  # int32.
  segments: chex.Array  # int32, attention stays within one; 0 is padding.
  positions: chex.Array  # int32, index within the sample, for rope.
  prefixes: chex.Array | None = None  # int32, segment also visible; 0: none.
  targets: chex.Array | None = None  # int32, the next token of the same sample.
  mask: chex.Array | None = None  # bool, targets to score.
  # float32, log-prob of each token when sampled; 0 for other tokens.
  logprobs: chex.Array | None = None
  # Experts that the sampler chose at each token, int [R, C, layers · k], -1
  # where it chose none.
  choices: chex.Array | None = None
  count: chex.Array | None = None  # int32 scalar, micro-batches with tokens.

  def rows(self, i: chex.Numeric) -> "PackedRows":
    """Returns micro-batch i, [R, C]."""
    take = lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    return jax.tree.map(take, self.replace(count=None))


# Activations of a layer that are kept for the backward pass.
REMAT_POLICIES = {
  "full": jax.checkpoint_policies.nothing_saveable,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "none": jax.checkpoint_policies.everything_saveable,
}
_PREFILL_CHUNK = 512  # Tokens per context and chunk.
# Name -> function of (config, numerics, rngs) that makes the module.
_MODULES = {
  "embed": lambda c, _, rngs: layers_lib.Embed(c, rngs),
  "norm": lambda c, *_: layers_lib.make_norm(c),
  "head": lambda c, numerics, rngs: layers_lib.Linear(
    c.hidden_size, c.vocab_size, bias=False, numerics=numerics, rngs=rngs
  ),
}


def places(config: ModelConfig) -> dict[str, Any]:
  """Maps the parameter name of each layer of a period to its kind.

  Parameters have the stacked layers of all periods under that name.
  """
  return {f"layers{i or ''}": kind for i, kind in enumerate(config.period)}


def _maker(kind: Any) -> Callable[..., nnx.Module]:
  """Returns the constructor of a module by its name or layer kind."""
  if isinstance(kind, str):
    return _MODULES[kind]

  def make(config, numerics, rngs):
    layer = kind.make(config, numerics, rngs)
    if config.adapters is not None:
      config.adapters.attach(layer, rngs)
    return layer

  return make


@functools.cache
def _graphdef(kind: Any, *settings: Any) -> nnx.GraphDef:
  """Returns the structure of a module without its arrays."""
  make = functools.partial(_maker(kind), *settings)
  return nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))[0]


def _module(kind: Any, *settings: Any) -> nnx.Module:
  """Builds a module from a config, numerics and its parameters."""
  *settings, params = settings
  return nnx.merge(_graphdef(kind, *settings), params)


def init(key: chex.PRNGKey, config: ModelConfig) -> Params:
  """Draws random parameters: float32, layers stacked along axis 0.

  The base of adapters has its own dtype.
  """

  def make(kind, key):
    module = _maker(kind)(config, FLOAT32, nnx.Rngs(key))
    return nnx.to_pure_dict(nnx.state(module))

  key_embed, key_layers, key_head = jax.random.split(key, 3)
  keys = jax.random.split(key_layers, config.num_layers)
  kinds = places(config)
  params = {
    "embed": make("embed", key_embed),
    "final_norm": make("norm", 0),  # Draws nothing.
  }
  for first, (place, kind) in enumerate(kinds.items()):
    every = jax.vmap(functools.partial(make, kind))
    params[place] = every(keys[first :: len(kinds)])
  if not config.tie_word_embeddings:
    params["lm_head"] = make("head", key_head)
  return config.adapters.store(params) if config.adapters else params


def with_adapters(
  params: Params, key: chex.PRNGKey, config: ModelConfig
) -> Params:
  """Returns a model with fresh adapters, from one without.

  Args:
    params: parameters of `config.base`.
    key: key of the adapters.
    config: the architecture.
  """
  if config.adapters is None:
    return params
  drawn = traverse_util.flatten_dict(init(key, config))
  leaves = traverse_util.flatten_dict(config.adapters.store(params))
  leaves |= {k: x for k, x in drawn.items() if k[-1] in adapters.FACTORS}
  return traverse_util.unflatten_dict(leaves)


@functools.cache
def param_shapes(config: ModelConfig) -> Params:
  """Returns the parameter tree with `jax.ShapeDtypeStruct` leaves."""
  return jax.eval_shape(lambda: init(jax.random.key(0), config))


def linear_layers(config: ModelConfig) -> list[str]:
  """Returns the paths of the linear layers of a layer, as 'attention/q'.

  Experts are none: their kernels have an axis more.
  """
  shapes = traverse_util.flatten_dict(param_shapes(config.base))
  found = {
    "/".join(path[1:-1]): None
    for path, x in shapes.items()
    if path[0] in places(config) and path[-1] == "kernel" and x.ndim == 3
  }
  return list(found)


def num_params(config: ModelConfig) -> int:
  """Returns the number of parameters, whatever they are stored in.

  Tied embeddings count once.
  """
  if config.adapters:
    plain = dataclasses.replace(config.adapters, base_dtype="float32")
    config = dataclasses.replace(config, adapters=plain)
  return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config)))


def head(params: Params) -> tuple[jax.Array, bool]:
  """Returns the output matrix and whether it is the embedding [V, D]."""
  if "lm_head" in params:
    return params["lm_head"]["kernel"], False
  return params["embed"]["embedding"], True


def logits(params: Params, states: chex.Array) -> jax.Array:
  """Returns float32 logits [..., V] of final hidden states [..., D]."""
  return heads.project(states, *head(params))


def hidden(
  params: Params,
  packed: PackedRows,
  extra_embeddings: chex.Array | None = None,
  **settings: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns final hidden states, after the last norm; see `states`."""
  x, aux = states(params, packed, extra_embeddings, **settings)
  norm = settings["config"], settings["numerics"], params["final_norm"]
  return _module("norm", *norm)(x), aux


def states(
  params: Params,
  packed: PackedRows,
  extra_embeddings: chex.Array | None = None,
  *,
  layers: int | None = None,
  config: ModelConfig,
  numerics: Numerics,
  remat_policy: str,
  attention: Mapping[AttentionKind, Callable[..., jax.Array]],
  sharding: jax.sharding.NamedSharding | None = None,
  expert_capacity: float = 0.0,
  replay: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns hidden states [R, C, D] of packed rows.

  Args:
    params: stacked parameters.
    packed: the rows, in the order of `context.zigzag_shard`.
    extra_embeddings: [R, C, D], added to the token embeddings, or None.
    layers: number of layers to run, a multiple of the period; None: all.
    config: the architecture.
    numerics: dtypes and products.
    remat_policy: activations that the backward pass recomputes, one of
      `REMAT_POLICIES`.
    attention: `PackedAttention.attend` by kind of attention.
    sharding: sharding of the hidden states, constrained after every layer.
    expert_capacity: `Routing.capacity` of experts.
    replay: use `packed.choices` where the sampler chose experts.

  Returns:
    The states, and auxiliary outputs by name, float [R, C], summed over layers.
  """
  segments, prefixes = packed.segments, packed.prefixes
  if prefixes is None:
    prefixes = jnp.zeros_like(segments)
  kinds, rotary = places(config), _rotary(config, packed.positions)
  stacked = {place: params[place] for place in kinds}
  choices = experts.by_place(packed.choices if replay else None, kinds)
  if layers is not None:
    stacked, choices = _first(layers, (stacked, choices), config)

  def pin(x):
    if sharding is None:
      return x
    return jax.lax.with_sharding_constraint(x, sharding)

  def attend(kind, q, k, v):
    return attention[kind](q, k, v, segments, prefixes), None

  def layer(kind, x, layer_params, choices):
    module = _module(kind, config, numerics, layer_params)
    routing = experts.Routing(segments > 0, choices, sharding, expert_capacity)
    x, _, aux = module(x, rotary[kind.attention], attend, routing)
    aux.pop(experts.CHOICES, None)
    return pin(x), aux

  policy = REMAT_POLICIES[remat_policy]
  if policy is not jax.checkpoint_policies.everything_saveable:
    layer = jax.checkpoint(
      layer, prevent_cse=False, policy=policy, static_argnums=0
    )

  def period(x, given):
    params, choices = given
    sums = {}
    for place, kind in kinds.items():
      x, aux = layer(kind, x, params[place], choices.get(place))
      sums |= {name: sums.get(name, 0) + term for name, term in aux.items()}
    return x, sums

  dtype = numerics.activations
  x = _module("embed", config, numerics, params["embed"])(packed.tokens, dtype)
  if extra_embeddings is not None:
    x += extra_embeddings.astype(dtype)
  x, aux = jax.lax.scan(period, pin(x), (stacked, choices))
  return x, {name: jnp.sum(terms, axis=0) for name, terms in aux.items()}


def _first(layers: int, stacked: Any, config: ModelConfig) -> Any:
  """Returns the first layers of arrays that are stacked by period."""
  check_number("layers", layers, f"[0, {config.num_layers}]")
  period = len(config.period)
  if layers % period:
    raise ValueError(
      f"layers must be a multiple of the period {period}, got {layers}"
    )
  return jax.tree.map(lambda x: x[: layers // period], stacked)


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
  stacked = [params[place] for place in places(config)]
  period = len(stacked)

  def layer(i):
    taken = jax.tree.map(lambda x: x[i // period], stacked[i % period])
    return numerics.store_layer(taken)

  params = {k: x for k, x in params.items() if k not in places(config)}
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
  chunk: int = _PREFILL_CHUNK,
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
  found = logits(params, states), kv_cache
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
  rotary = _rotary(config, positions)
  dtype = numerics.activations
  x = _module("embed", config, numerics, params["embed"])(tokens, dtype)
  kv_cache, choices = [], []
  for i, kind in enumerate(config.layers):
    module = _module(kind, config, numerics, params["layers"][i])
    x, layer_cache, aux = module(
      x, rotary[kind.attention], functools.partial(attend, i), routing
    )
    kv_cache.append(layer_cache)
    choices += [aux[experts.CHOICES]] if experts.CHOICES in aux else []
  norm = _module("norm", config, numerics, params["final_norm"])
  return norm(x), tuple(kv_cache), choices


def _rotary(config, positions):
  """Returns rotary tables by kind of attention."""
  return {
    kind: layers_lib.rotary_tables(
      positions,
      *rope.frequencies(kind.head_dim, kind.rope_theta, kind.rope_scaling),
    )
    for kind in dict.fromkeys(kind.attention for kind in config.period)
  }
