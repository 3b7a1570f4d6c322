"""The decoder as functions of plain parameter dicts, over packed rows.

Layer kinds repeat with a period, one layer if all are alike. Training scans
over periods, and the parameters of each layer of a period are stacked. The
sampler unrolls the same layers, see `decoding`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax import Array

from jaxrl_llm import sharding as sharding_lib
from jaxrl_llm.errors import check_number
from jaxrl_llm.models import adapters, experts, heads, rope
from jaxrl_llm.models import layers as layers_lib
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import AttentionKind
from jaxrl_llm.models.numerics import FLOAT32, Numerics

Params = dict[str, Any]


@chex.dataclass(frozen=True)
class PackedRows:
  """Samples packed into rows [R, C], for training.

  If `count` is set, arrays are micro-batches of such rows, [M, R, C].
  """

  tokens: chex.Array  # int32.
  segments: chex.Array  # int32, attention stays within one; 0 is padding.
  positions: chex.Array  # int32, index within the sample, for rope.
  prefixes: chex.Array | None = None  # int32, segment also visible; 0: none.
  targets: chex.Array | None = None  # int32, the next token of the same sample.
  mask: chex.Array | None = None  # bool, targets to score.
  # int32, samples that share a token; 0: padding. None: one.
  samples: chex.Array | None = None
  # float32, log-prob of each token when sampled; 0 for other tokens.
  logprobs: chex.Array | None = None
  # Experts that the sampler chose for each token, int [R, C, layers · k], or
  # -1 if it chose none.
  choices: chex.Array | None = None
  count: chex.Array | None = None  # int32 scalar, micro-batches with tokens.
  # float32 scalar, which divided the logits when the tokens were sampled; None
  # is 1.
  temperature: chex.Numeric | None = None

  def rows(self, i: chex.Numeric) -> "PackedRows":
    """Returns micro-batch i, [R, C]."""
    take = lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    rows = jax.tree.map(take, self.replace(count=None, temperature=None))
    return rows.replace(temperature=self.temperature)


# Name -> activations of a layer that are saved for the backward pass.
REMAT_POLICIES = {
  "full": jax.checkpoint_policies.nothing_saveable,
  # By name: a policy on products would save their float32 sums.
  "dots": jax.checkpoint_policies.save_only_these_names(layers_lib.PRODUCT),
  "none": jax.checkpoint_policies.everything_saveable,
}
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

  Under that name, parameters contain this layer of all periods, stacked.
  """
  return {f"layers{i or ''}": kind for i, kind in enumerate(config.period)}


def _make(
  kind: Any, config: ModelConfig, numerics: Numerics, rngs: nnx.Rngs
) -> nnx.Module:
  """Makes a module by its name, or a layer with its adapters by its kind."""
  if isinstance(kind, str):
    return _MODULES[kind](config, numerics, rngs)
  layer = kind.make(config, numerics, rngs)
  if config.adapters is not None:
    config.adapters.attach(layer, rngs)
  return layer


@functools.cache
def _graphdef(kind: Any, *settings: Any) -> nnx.GraphDef:
  """Returns the structure of a module without its arrays."""
  module = nnx.eval_shape(lambda: _make(kind, *settings, nnx.Rngs(0)))
  return nnx.split(module)[0]


def make_module(
  kind: Any, config: ModelConfig, numerics: Numerics, params: Params
) -> nnx.Module:
  """Builds a module, by its name or layer kind, from its parameters."""
  return nnx.merge(_graphdef(kind, config, numerics), params)


def embed(
  params: Params,
  tokens: chex.Array,
  config: ModelConfig,
  numerics: Numerics,
  sharding: jax.sharding.NamedSharding | None = None,
) -> Array:
  """Returns the embeddings [R, C, D] of tokens.

  Args:
    params: parameters with the table [V, D].
    tokens: int32 [R, C].
    config: the architecture.
    numerics: dtypes.
    sharding: sharding of the result; None leaves it to the compiler.
  """
  module = make_module("embed", config, numerics, params["embed"])
  x = module(tokens, numerics.activations)
  if sharding is None:
    return x
  # In one step, XLA may replicate the embeddings of all tokens.
  for place in sharding_lib.lookup_shardings(sharding, config.hidden_size):
    x = jax.lax.with_sharding_constraint(x, place)
  return x


def final_norm(
  params: Params, x: chex.Array, config: ModelConfig, numerics: Numerics
) -> Array:
  """Applies the norm after the last layer to states [..., D]."""
  return make_module("norm", config, numerics, params["final_norm"])(x)


def init(key: chex.PRNGKey, config: ModelConfig) -> Params:
  """Initialises random float32 parameters, layers stacked along axis 0.

  With adapters, the base has its storage dtype.
  """

  def make(kind: Any, key: chex.PRNGKey):
    module = _make(kind, config, FLOAT32, nnx.Rngs(key))
    return nnx.to_pure_dict(nnx.state(module))

  key_embed, key_layers, key_head = jax.random.split(key, 3)
  keys = jax.random.split(key_layers, config.num_layers)
  kinds = places(config)
  params = {
    "embed": make("embed", key_embed),
    "final_norm": make("norm", 0),  # Not random.
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
  """Adds new adapters to the parameters of a model.

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
  """Returns the paths of linear layers within a layer, such as 'attention/q'.

  Experts are excluded: their kernels have one more axis.
  """
  shapes = traverse_util.flatten_dict(param_shapes(config.base))
  found = {
    "/".join(path[1:-1]): None
    for path, x in shapes.items()
    if path[0] in places(config) and path[-1] == "kernel" and x.ndim == 3
  }
  return list(found)


def num_params(config: ModelConfig) -> int:
  """Returns the number of parameters, independent of their storage format.

  Tied embeddings count once.
  """
  if config.adapters:
    plain = dataclasses.replace(config.adapters, base_dtype="float32")
    config = dataclasses.replace(config, adapters=plain)
  return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config)))


def multiplied_params(config: ModelConfig) -> int:
  """Returns the number of parameters that a token is multiplied by.

  Embeddings are looked up, so they count only if they are also the head. Of the
  experts, only those that a token uses count.
  """
  table = 0 if config.tie_word_embeddings else config.vocab_size
  used = num_params(config) - table * config.hidden_size
  for kind in experts.kinds(config):
    idle = 1 - kind.per_token / kind.num_experts
    used -= round(idle * expert_params(config, kind))
  return used


def expert_params(config: ModelConfig, kind: experts.ExpertsKind) -> int:
  """Returns the number of parameters of the experts of a layer."""
  width = config.hidden_size * kind.intermediate_size
  return 3 * kind.num_experts * width


def head(params: Params) -> tuple[Array, bool]:
  """Returns the output matrix and whether it is the embedding [V, D]."""
  if "lm_head" in params:
    return params["lm_head"]["kernel"], False
  return params["embed"]["embedding"], True


def logits(params: Params, states: chex.Array, config: ModelConfig) -> Array:
  """Returns float32 logits [..., V] of final hidden states [..., D]."""
  return heads.logits(states, *head(params), config.unused)


def hidden(
  params: Params,
  packed: PackedRows,
  extra_embeddings: chex.Array | None = None,
  **settings: Any,
) -> tuple[Array, dict[str, Array]]:
  """Returns final hidden states, after the last norm; see `states`."""
  x, aux = states(params, packed, extra_embeddings, **settings)
  return final_norm(params, x, settings["config"], settings["numerics"]), aux


def states(
  params: Params,
  packed: PackedRows,
  extra_embeddings: chex.Array | None = None,
  *,
  layers: int | None = None,
  config: ModelConfig,
  numerics: Numerics,
  remat_policy: str,
  attention: Mapping[AttentionKind, Callable[..., Array]],
  sharding: jax.sharding.NamedSharding | None = None,
  expert_capacity: float = 0.0,
  replay: bool = False,
  load: chex.Array | None = None,
) -> tuple[Array, dict[str, Array]]:
  """Returns hidden states [R, C, D] of packed rows.

  Args:
    params: stacked parameters.
    packed: the rows, in the order of `context.zigzag_shard`.
    extra_embeddings: [R, C, D], added to the token embeddings, or None.
    layers: number of layers to run, a multiple of the period; None: all.
    config: the architecture.
    numerics: dtypes and matrix products.
    remat_policy: activations that the backward pass recomputes, one of
      `REMAT_POLICIES`.
    attention: `PackedAttention.attend` by kind of attention.
    sharding: sharding of the hidden states, constrained after every layer.
    expert_capacity: `Routing.capacity` of experts.
    replay: whether to use the sampler's choices, `packed.choices`.
    load: `Routing.load` of experts.

  Returns:
    The states, and auxiliary outputs by name, summed over layers: float [R, C]
    each, and with experts `experts.LOAD`.
  """
  segments, prefixes = packed.segments, packed.prefixes
  if prefixes is None:
    prefixes = jnp.zeros_like(segments)
  samples = segments > 0 if packed.samples is None else packed.samples
  kinds, rotary = places(config), rotary_tables(config, packed.positions)
  stacked = {place: params[place] for place in kinds}
  choices = experts.by_place(packed.choices if replay else None, kinds)
  if layers is not None:
    stacked, choices = _first(layers, (stacked, choices), config)

  def pin(x: Array):
    if sharding is None:
      return x
    return jax.lax.with_sharding_constraint(x, sharding)

  def attend(kind: AttentionKind, q: Array, k: Array, v: Array):
    return attention[kind](q, k, v, segments, prefixes), None

  def layer(kind: Any, x: Array, layer_params: Params, choices: Array | None):
    module = make_module(kind, config, numerics, layer_params)
    routing = experts.Routing(samples, choices, sharding, expert_capacity, load)
    x, _, aux = module(x, rotary[kind.attention], attend, routing)
    aux.pop(experts.CHOICES, None)
    return pin(x), aux

  policy = REMAT_POLICIES[remat_policy]
  if policy is not jax.checkpoint_policies.everything_saveable:
    layer = jax.checkpoint(
      layer, prevent_cse=False, policy=policy, static_argnums=0
    )

  def period(x: Array, given: tuple[Any, ...]):
    params, choices = given
    sums = {}
    for place, kind in kinds.items():
      x, aux = layer(kind, x, params[place], choices.get(place))
      sums |= {name: sums.get(name, 0) + term for name, term in aux.items()}
    return x, sums

  x = embed(params, packed.tokens, config, numerics, sharding)
  if extra_embeddings is not None:
    x = pin(x + extra_embeddings.astype(x.dtype))
  x, aux = jax.lax.scan(period, x, (stacked, choices))
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


def rotary_tables(config: ModelConfig, positions: Array):
  """Returns rotary tables by kind of attention."""
  return {
    kind: layers_lib.rotary_tables(
      positions,
      *rope.frequencies(kind.head_dim, kind.rope_theta, kind.rope_scaling),
    )
    for kind in config.attention_kinds
  }
