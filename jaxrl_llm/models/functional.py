"""Models as named tuples of pure functions over plain dicts."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from jaxrl_llm.models import context, decoding, experts, heads, transformer
from jaxrl_llm.models.adapters import base_of
from jaxrl_llm.models.backends import choose
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kv_cache import KVCache
from jaxrl_llm.models.numerics import FLOAT32, Numerics
from jaxrl_llm.models.params import merge
from jaxrl_llm.models.transformer import PackedRows

_MAX_SURPRISE = 8.0  # Nats; a larger embedding would dominate the others.


class ModelFns(NamedTuple):
  """A language model as pure functions of `params`, a plain nested dict.

  `params` below has the stacked layout of training and checkpoints, as one tree
  or as two (`Params`). Functions of the sampler take `sampler_params`, which
  `for_sampling` makes from it.
  """

  config: ModelConfig
  # (key) -> params, float32.
  init: Callable[..., Any]
  # (params, PackedRows, load=None) -> (heads.TokenLogprobs of
  #  the targets, auxiliary losses of the model by name, [R, C], which training
  #  adds). `load` is the result of the field of that name over all tokens.
  logprobs: Callable[..., tuple[heads.TokenLogprobs, dict[str, Array]]]
  # (params, tokens [B,T], mask [B,T]) -> float32 [B,T,V]; for tests and Colabs.
  logits: Callable[..., Array]
  # (params, PackedRows, layers) -> [R,C,D], hidden states after that many
  #  layers, for probes and heads.
  states: Callable[..., Array]
  # (params) -> sampler_params, in the sampler's dtype and layout.
  for_sampling: Callable[..., Any]
  # Sharding of the arrays of the paged KV cache; None: one device.
  kv_sharding: NamedSharding | None
  # Whether several slots may read one page.
  shares_pages: bool
  # Whether packed samples may share a prompt, see `PackedAttention`.
  shares_prompts: bool
  # (shards, pages, page_size) -> a paged KV cache of zeros.
  init_kv_cache: Callable[..., KVCache]
  # (sampler_params, tokens [N,C]) -> the contiguous KV cache of N contexts.
  prefill: Callable[..., KVCache]
  # (sampler_params, kv_cache, BlockTables, tokens [S,Q], positions [S,Q],
  #  writing [S,Q]) -> (logits [S,Q,V], kv_cache) and, if `choices` is set, the
  #  experts of each token, [S,Q,layers · k].
  decode: Callable[..., tuple]
  # Expert choices of a token that the sampler records for routing replay.
  choices: jax.ShapeDtypeStruct | None = None
  # (params, PackedRows) -> `experts.LOAD` of the rows; None: no experts, or no
  # loss that balances them.
  load: Callable[..., Array] | None = None

  @property
  def slots_sharding(self) -> NamedSharding | None:
    """Sharding of the sampler's arrays [S, ...]; None: one device."""
    return context.leading(self.kv_sharding, 1)


class ValueFns(NamedTuple):
  """A critic: the same backbone with a value head."""

  config: ModelConfig
  # (key) -> params, float32.
  init: Callable[..., Any]
  # (params of a policy or a critic) -> params: a copy of the backbone, and a
  #  new head or a copy of the critic's head.
  from_policy: Callable[..., Any]
  # (params, PackedRows, load=None) -> (outputs of the head by name: `values`,
  #  float32 [R, C], and the other inputs of its loss, [R, C, ...]; auxiliary
  #  losses, as in `ModelFns`).
  outputs: Callable[..., tuple[dict[str, Array], dict[str, Array]]]
  # See `ModelFns`.
  shares_prompts: bool
  head: heads.ValueHead
  count: int = 1  # Number of critics.
  # Input [B] with the index of the critic that a response trains, if several.
  owner: str = ""
  load: Callable[..., Any] | None = None  # See `ModelFns`; of each critic.


class _Layers:
  """The layers in training, on packed rows, with the functions that run them.

  Layers process rows in the order of `context.zigzag_shard`.
  """

  def __init__(
    self,
    config: ModelConfig,
    kernels: str,
    sharding: NamedSharding | None,
    **settings: Any,
  ):
    """Makes the attention; settings are those of `transformer.states`."""
    experts.check_mesh(config, sharding)
    kinds = config.attention_kinds
    make = choose(kernels, kinds, sharding).make_packed_attention
    packed = {kind: make(kind, sharding=sharding) for kind in kinds}
    attention = {kind: made.attend for kind, made in packed.items()}
    settings |= {"config": config, "attention": attention}
    settings["sharding"] = context.leading(sharding, 2)
    self.config, self._parts = config, context.num_shards(sharding, 1)
    self.sees_prefixes = all(made.sees_prefixes for made in packed.values())
    self._states = functools.partial(transformer.states, **settings)
    self._hidden = functools.partial(transformer.hidden, **settings)
    balanced = any(kind.balance for kind in experts.kinds(config))
    self.load = self.on_rows(self._load) if balanced else None

  def on_rows(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of merged parameters and of rows in zigzag order.

    The wrapper takes and returns rows in their original order, and accepts
    parameters in two trees. Results with one axis are not of rows.
    """

    def run(params: Any, packed: PackedRows, *arguments):
      rows = context.zigzag_shard(packed, self._parts)
      found = function(merge(params), rows, *arguments)
      sizes = self._parts, packed.tokens.shape[1]
      back = lambda x: context.zigzag_unshard(x, *sizes) if x.ndim > 1 else x
      return jax.tree.map(back, found)

    return run

  def _load(self, *given: Any):
    return self._states(*given)[1][experts.LOAD]

  def states(self, params: Any, packed: PackedRows, layers: int):
    return self._states(params, packed, layers=layers)[0]

  def hidden(self, *given: Any, load: Array | None):
    """Returns final hidden states and the auxiliary losses."""
    states, aux = self._hidden(*given, load=load)
    aux.pop(experts.LOAD, None)
    return states, aux

  def logits(self, params: Any, tokens: Array, mask: Array):
    segments = mask.astype(jnp.int32)
    positions = jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)
    packed = PackedRows(tokens=tokens, segments=segments, positions=positions)
    states, _ = self.on_rows(self._hidden)(params, packed)
    return transformer.logits(merge(params), states, self.config)

  def logprobs(
    self, params: Any, rows: PackedRows, load: Array | None = None, **in_chunks
  ):
    states, aux = self.hidden(params, rows, load=load)
    of_tokens = states, rows.targets, rows.mask
    to_rows = lambda x: context.shards_to_rows(x, self._parts)
    states, targets, mask = map(to_rows, of_tokens)
    kernel, tied = transformer.head(params)
    temperature = 1.0 if rows.temperature is None else rows.temperature
    scored = heads.chunked_logprobs(
      states, kernel, targets, mask, temperature, tied=tied, **in_chunks
    )
    back = lambda x: context.rows_to_shards(x, self._parts)
    return heads.TokenLogprobs(*map(back, scored)), aux


def _init_surprise(embedding: Array):
  """Returns the embedding of one nat, float32 [D], half as long as a token's.

  Its direction is random, but the same in every run. When initialised to zeros,
  it was learned a dozen training steps later on the built-in task.
  """
  direction = jax.random.normal(jax.random.key(0), embedding.shape[1:])
  return 0.5 * jnp.std(embedding) * direction


def _embed_surprise(params: Any, logprobs: Array):
  """Embeds log-probs [R, C] in nats as [R, C, D]."""
  nats = jnp.minimum(-logprobs, _MAX_SURPRISE)
  return nats[..., None] * params["surprise"]["kernel"][None, None]


# Equal settings return the same functions, so that nothing is compiled twice.
@functools.lru_cache(maxsize=16)
def make_policy(
  config: ModelConfig,
  *,
  numerics: Numerics = FLOAT32,
  sampler: Numerics | None = None,
  remat_policy: str = "full",
  head_chunk: int = 0,
  head_sharding: NamedSharding | None = None,
  sharding: NamedSharding | None = None,
  kernels: str = "auto",
  sampler_sharding: NamedSharding | None = None,
  kv_block: int = 0,
  expert_capacity: float = 0.0,
  replay_routing: bool = False,
) -> ModelFns:
  """Makes the language model of a config.

  Args:
    config: the architecture.
    numerics: numerics of training, with float32 master weights.
    sampler: numerics of the sampler; None: the dtype of the trainer's
      activations throughout, and the trainer's matrix products. If the numerics
      differ, the log-probs of sampler and trainer differ by rounding. On a CPU,
      a bfloat16 cache is several times slower than a float32 cache.
    remat_policy: activations that the backward pass recomputes, one of
      `transformer.REMAT_POLICIES`.
    head_chunk: time steps per application of the vocabulary head; 0: see
      `heads.default_chunk`.
    head_sharding: as in `heads.chunked_logprobs`.
    sharding: sharding of keys and values in training, see
      `sharding.packed_kv_sharding`; None: one device.
    kernels: attention backend, one of `kernels.NAMES`.
    sampler_sharding: sharding of the sampler's slots and KV heads, see
      `sharding.slot_sharding`; None: one device.
    kv_block: tokens per block of keys and values in the sampler's kernels; 0:
      chosen by shape.
    expert_capacity: maximum number of tokens per expert in training, relative
      to an even load; 0: no limit.
    replay_routing: whether the sampler records its expert choices and training
      reuses them.

  Raises:
    InputError: The backend does not support this model on these devices, the
      size of an expert group does not divide the number of experts, or there
      are no experts whose routing could be replayed.
  """
  bind = functools.partial
  layers = _Layers(
    *(config, kernels, sharding),
    numerics=numerics,
    remat_policy=remat_policy,
    expert_capacity=expert_capacity,
    replay=replay_routing,
  )
  choices = experts.choices_shape(config) if replay_routing else None
  experts.check_mesh(config, sampler_sharding)
  kinds = config.attention_kinds
  make = choose(kernels, kinds, sampler_sharding).make_kernels
  make = bind(make, sharding=sampler_sharding, kv_block=kv_block)
  sampled = decoding.SamplerModel(
    config,
    sampler or Numerics.all(numerics.activations, matmul=numerics.matmul),
    {kind: make(kind) for kind in kinds},
    choices,
  )
  in_chunks = {"chunk": head_chunk, "sharding": head_sharding}
  in_chunks["unused"] = config.unused
  return ModelFns(
    config=config,
    init=bind(transformer.init, config=config),
    logprobs=layers.on_rows(bind(layers.logprobs, **in_chunks)),
    logits=layers.logits,
    states=layers.on_rows(layers.states),
    for_sampling=sampled.for_sampling,
    kv_sharding=sampled.backend.kv_sharding,
    shares_pages=sampled.backend.shares_pages,
    shares_prompts=layers.sees_prefixes,
    init_kv_cache=sampled.init_kv_cache,
    prefill=sampled.prefill,
    decode=sampled.decode,
    choices=choices,
    load=layers.load,
  )


@functools.lru_cache(maxsize=16)
def make_value(
  config: ModelConfig,
  *,
  numerics: Numerics = FLOAT32,
  remat_policy: str = "full",
  kernels: str = "auto",
  sharding: NamedSharding | None = None,
  reads_logprobs: bool = False,
  head: heads.ValueHead = heads.SCALAR,
  expert_capacity: float = 0.0,
) -> ValueFns:
  """Makes the critic of a config: its backbone and a float32 head.

  Args:
    config, numerics, remat_policy, kernels, sharding, expert_capacity: as in
      `make_policy`.
    reads_logprobs: whether the critic also reads the log-prob of each token
      under the policy that sampled it, `PackedRows.logprobs`. Which tokens the
      policy finds unlikely depends on its head, which a critic lacks.
    head: turns the outputs of a linear layer into values.
  """
  layers = _Layers(
    *(config, kernels, sharding),
    numerics=numerics,
    remat_policy=remat_policy,
    expert_capacity=expert_capacity,
  )

  def from_policy(params: Any):
    """Copies the backbone and the value head; a new head is zero.

    Adapters are not copied: training starts from the base.
    """
    size = head.outputs
    zeros = {
      "kernel": jnp.zeros((config.hidden_size, size), jnp.float32),
      "bias": jnp.zeros((size,), jnp.float32),
    }
    params = merge(params)
    trunk = {k: v for k, v in params.items() if not k.endswith("_head")}
    trunk = jax.tree.map(jnp.copy, base_of(trunk))
    if config.adapters is None:
      trunk = jax.tree.map(lambda x: x.astype(jnp.float32), trunk)
    trunk = transformer.with_adapters(trunk, jax.random.key(0), config)
    given = params.get("value_head", zeros)
    own = {"value_head": jax.tree.map(jnp.copy, given)}
    if reads_logprobs:
      table = params["embed"]["embedding"].astype(jnp.float32)
      own["surprise"] = {"kernel": _init_surprise(table)}
    return trunk | own

  def init(key: chex.PRNGKey):
    return from_policy(transformer.init(key, config))

  def outputs(params: Any, packed: PackedRows, load: Array | None = None):
    extra = _embed_surprise(params, packed.logprobs) if reads_logprobs else None
    states, aux = layers.hidden(params, packed, extra, load=load)
    linear, states = params["value_head"], states.astype(jnp.float32)
    found = jnp.dot(states, linear["kernel"]) + linear["bias"][None, None]
    return head.read(found), aux

  functions = init, from_policy, layers.on_rows(outputs), layers.sees_prefixes
  return ValueFns(config, *functions, head, load=layers.load)
