"""Mixture of experts: a router and gated MLPs, of which each token uses k.

Dispatch is dropless by default: token copies are sorted by expert and
multiplied in groups of any size, so that no token depends on others. With a
capacity, an expert takes at most that many tokens per device and drops the
rest.

On a mesh, each device dispatches its own part of the tokens. The devices of an
expert group (`sharding.make_mesh`) hold different experts, independent of how
attention is sharded over them. Without a capacity, tokens are all-gathered in
the group, each device applies its own experts to all of them, and the results
are reduce-scattered. This is exact, because buffers fit the worst case, and
sends no more bytes than an all-to-all of k copies as long as the group has at
most k devices. With a capacity, an all-to-all sends at most k copies of each
token, in buffers of the size of the capacity.

References:
  Fedus et al. 2022, Switch Transformers, arXiv 2101.03961 (load balancing,
    capacity).
  Gale et al. 2023, MegaBlocks, arXiv 2211.15841 (dropless experts).
  Liu et al. 2025, MoE Parallel Folding, arXiv 2504.14960.
  Ma et al. 2025, arXiv 2510.11370 (routing replay).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import Rngs
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.grouped import grouped_matmul
from jaxrl_llm.models.layers import Linear, Matrix
from jaxrl_llm.models.numerics import Numerics
from jaxrl_llm.sharding import expert_axes

# Auxiliary outputs: the experts chosen for each token, int [B, T, k], and how
# often the tokens chose each expert, float32 [E], summed over layers.
CHOICES, LOAD = "choices", "load"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsKind:
  """Settings of the experts of a layer."""

  num_experts: int
  per_token: int  # Experts that a token uses.
  intermediate_size: int
  balance: float  # Coefficient of the load-balancing loss.

  def make(self, *settings: Any) -> "Experts":
    """Makes the module, from (config, numerics, rngs)."""
    return Experts(self, *settings)


class Routing(NamedTuple):
  """Properties of the tokens [B, T] of a call that experts depend on."""

  # int or bool [B, T], samples that a token is part of; 0: padding. None: 1.
  samples: chex.Array | None = None
  # int [B, T, k], experts to use; the router chooses where this is negative.
  # None: the router chooses all.
  choices: chex.Array | None = None
  # Sharding of the leading axes of the tokens; None: one device.
  sharding: NamedSharding | None = None
  # Maximum number of tokens per expert, relative to an even load; 0: no limit.
  capacity: float = 0.0
  # Load to balance, `LOAD` of all layers; None: that of each layer's call.
  load: chex.Array | None = None


def kinds(config: ModelConfig) -> list[ExpertsKind]:
  """Returns the kind of the experts of every layer that has experts."""
  return [kind.mlp for kind in config.layers if _has_experts(kind)]


def _has_experts(kind: Any) -> bool:
  return isinstance(getattr(kind, "mlp", None), ExpertsKind)


def check_mesh(config: ModelConfig, sharding: NamedSharding | None) -> None:
  """Checks that the size of an expert group divides the number of experts.

  Raises:
    InputError: It does not.
  """
  axes = expert_axes(sharding.mesh) if sharding else ()
  for kind in kinds(config):
    size = math.prod(sharding.mesh.shape[axis] for axis in axes)
    if kind.num_experts % size:
      raise InputError(
        f"config.mesh.expert={size} must divide the {kind.num_experts} experts"
        " of a layer; choose another size, also for the sampler's mesh"
      )


def choices_shape(config: ModelConfig) -> jax.ShapeDtypeStruct:
  """Returns the shape [layers · k] and dtype of a token's choices.

  Raises:
    InputError: The model has no experts.
  """
  of = kinds(config)
  if not of:
    raise InputError(
      "config.model.replay_routing=True: this model has no experts; set it to"
      " False"
    )
  largest = max(kind.num_experts for kind in of)
  dtype = jnp.int8 if largest <= 128 else jnp.int16
  return jax.ShapeDtypeStruct((sum(kind.per_token for kind in of),), dtype)


def by_place(
  choices: chex.Array | None, places: Mapping[str, Any]
) -> dict[str, Array]:
  """Splits choices [R, C, layers · k] by place, into [periods, R, C, k] each.

  Args:
    choices: choices of all layers in order, or None.
    places: layer kinds of a period by name, see `transformer.places`.
  """
  if choices is None:
    return {}
  of = {name: x.mlp.per_token for name, x in places.items() if _has_experts(x)}
  choices = choices.reshape(*choices.shape[:2], -1, sum(of.values()))
  ends = [*itertools.accumulate(of.values())]
  return dict(zip(of, jnp.split(jnp.moveaxis(choices, 2, 0), ends, axis=-1)))


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["kernel", "scale"],
  meta_fields=["numerics"],
)
@dataclasses.dataclass(frozen=True)
class Weights:
  """Expert matrices [E, in, out] or their codes, and their numerics."""

  kernel: Array
  scale: Array | None  # [E, ...], scales of the codes.
  numerics: Numerics

  def grouped(self, x: Array, sizes: Array) -> Array:
    """Multiplies rows [N, in] sorted by expert, with `sizes` [E] rows each."""
    x, kernel = self.numerics.operands(x, self.kernel, self.scale)
    return grouped_matmul(x, kernel, sizes)

  def batched(self, x: Array) -> Array:
    """Multiplies the same number of rows for each expert, [E, n, in]."""
    x, kernel = self.numerics.operands(x, self.kernel, self.scale)
    y = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


_ByName = Mapping[str, Weights]


class Experts(nnx.Module):
  """Σ w_e MLP_e(x) over the k most probable experts, with Σ w_e = 1."""

  def __init__(
    self, kind: ExpertsKind, config: ModelConfig, numerics: Numerics, rngs: Rngs
  ):
    width, inner = config.hidden_size, kind.intermediate_size
    experts = kind.num_experts
    self.router = Linear(
      width, experts, bias=False, numerics=numerics, rngs=rngs
    )
    self.experts = nnx.Dict(
      gate=Matrix((experts, width, inner), numerics, rngs),
      up=Matrix((experts, width, inner), numerics, rngs),
      down=Matrix((experts, inner, width), numerics, rngs),
    )
    self.kind, self.layers = kind, max(len(kinds(config)), 1)

  def __call__(
    self, x: chex.Array, routing: Routing
  ) -> tuple[Array, dict[str, Array]]:
    """Applies the experts.

    Args:
      x: [B, T, D].
      routing: properties of the tokens.

    Returns:
      [B, T, D], and auxiliary outputs, float32 [B, T]:

      balance: the load-balancing loss of each token, balance · E Σ_e f_e p_e,
        divided by the number of layers, where p is the token's distribution
        over experts and f_e the number of times that a sample's token chose
        expert e, a mean over tokens and layers. The mean over all samples'
        tokens, summed over layers, is the loss of `transformers`.
      metrics/expert_load: E max_e f_e, the load of the most loaded expert
        relative to the mean, divided by the number of layers.
      metrics/expert_dropped: fraction of the token's choices that exceeded the
        capacity, divided by the number of layers; only if any may exceed it.

      Also `CHOICES`, int [B, T, k], and `LOAD`, float32 [E].
    """
    kind, shape, experts = self.kind, x.shape[:2], self.kind.num_experts
    tokens = x.reshape(-1, x.shape[-1])
    probs = jax.nn.softmax(self.router(tokens).astype(jnp.float32))
    _, chosen = jax.lax.top_k(probs, kind.per_token)
    samples = routing.samples
    samples = jnp.ones(shape, bool) if samples is None else samples
    counted = samples > 0
    if routing.choices is not None:
      given = routing.choices.reshape(chosen.shape).astype(chosen.dtype)
      # Padding may have k equal choices, which would take other tokens' rows.
      replayed = (given >= 0) & counted.reshape(-1, 1)
      chosen = jnp.where(replayed, given, chosen)
    weights = jnp.take_along_axis(probs, chosen, axis=-1)
    weights /= jnp.sum(weights, axis=-1, keepdims=True)
    repeated = jnp.repeat(samples.reshape(-1), kind.per_token)
    load = jnp.bincount(
      chosen.reshape(-1), weights=repeated.astype(jnp.float32), length=experts
    )
    share = lambda load: load / jnp.maximum(jnp.sum(load), 1)
    often = share(load if routing.load is None else routing.load)
    balance = jnp.sum(often[None] * probs, axis=-1) * kind.per_token
    fullest = jnp.full(shape, experts * jnp.max(share(load)) / self.layers)
    aux = {
      "balance": (kind.balance * experts / self.layers)
      * balance.reshape(shape),
      "metrics/expert_load": fullest,
      CHOICES: chosen.reshape(*shape, -1),
      LOAD: load,
    }
    arrays = tokens, chosen, weights, counted.reshape(-1)
    out, kept = self._dispatch(arrays, shape, routing)
    if kept is not None:
      dropped = jnp.where(counted, 1 - kept.reshape(shape), 0)
      aux["metrics/expert_dropped"] = dropped / self.layers
    return out.reshape(x.shape), aux

  def _dispatch(
    self, tokens: tuple[Array, ...], shape: tuple[int, int], routing: Routing
  ):
    """Applies experts to tokens on all devices.

    Args:
      tokens: arrays [B · T, ...]: tokens, chosen experts, their weights, valid.
      shape: (B, T).
      routing: properties of the tokens.

    Returns:
      [B · T, D], and the fraction of each token's choices that was kept,
      float32 [B · T]; None if none can be dropped.
    """
    kind, sharding = self.kind, routing.sharding
    experts = {
      k: Weights(*x.stored(), x.numerics) for k, x in self.experts.items()
    }
    if sharding is None:
      return _OnDevice(experts, (), kind).apply(*tokens, routing.capacity)
    mesh, axes = sharding.mesh, expert_axes(sharding.mesh)
    # Devices that hold the same tokens in attention take a part of them each.
    *leading, last = (tuple(jax.tree.leaves(x)) for x in sharding.spec)
    split = (*leading, (*last, "tensor"))
    if len(split) == 2:
      tokens = [x.reshape(*shape, *x.shape[1:]) for x in tokens]
    sizes = tokens[0].shape[: len(split)]
    ways = [math.prod(mesh.shape[axis] for axis in names) for names in split]
    pads = [(0, -size % way) for size, way in zip(sizes, ways)]
    # Padding chooses no expert of a group: k equal choices of a token would
    # take the rows of other tokens.
    fills = (0, kind.num_experts if axes else 0, 0, 0)
    tokens = [
      jnp.pad(x, pads + [(0, 0)] * (x.ndim - len(pads)), constant_values=fill)
      for x, fill in zip(tokens, fills)
    ]

    def on_device(experts: _ByName, *tokens):
      flat = (x.reshape(-1, *x.shape[len(split) :]) for x in tokens)
      found = _OnDevice(experts, axes, kind).apply(*flat, routing.capacity)
      lead = tokens[0].shape[: len(split)]
      return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), found)

    found = jax.shard_map(
      on_device,
      mesh=mesh,
      in_specs=(PartitionSpec(axes), *[PartitionSpec(*split)] * len(tokens)),
      out_specs=PartitionSpec(*split),
      check_vma=False,  # Pallas kernels do not declare it.
    )(experts, *tokens)
    return jax.tree.map(lambda x: x[tuple(map(slice, sizes))], found)


@dataclasses.dataclass(frozen=True)
class _OnDevice:
  """The experts of a device, which are applied to its tokens."""

  experts: _ByName
  axes: tuple[str, ...]  # Of the mesh, along which experts are distributed.
  kind: ExpertsKind

  def apply(
    self, x: Array, chosen: Array, weights: Array, valid: Array, capacity: float
  ):
    """Applies the experts; see `Experts._dispatch`.

    Args:
      x: [N, D].
      chosen: int [N, k].
      weights: float32 [N, k].
      valid: bool [N].
      capacity: as in `Routing`.
    """
    axes, kind = self.axes, self.kind
    limit = math.ceil(capacity * (len(x) * kind.per_token / kind.num_experts))
    if 0 < limit < len(x):  # Otherwise no token can be dropped.
      slot, out = self._limited(x, chosen, valid, limit)
      kept = jnp.mean(slot < len(out), axis=1, dtype=jnp.float32)
      return _combined(out, slot, weights), kept
    group = functools.partial(jax.lax.all_gather, axis_name=axes, tiled=True)
    if axes:
      x, chosen, weights = map(group, (x, chosen, weights))
    slot, out = self._dropless(x, chosen)
    out = _combined(out, slot, weights)
    if axes:
      out = jax.lax.psum_scatter(out, axes, scatter_dimension=0, tiled=True)
    return out, None

  def _dropless(self, x: Array, chosen: Array):
    """Returns the output row of each choice [N, k], and output rows [n, D].

    Choices of experts on other devices have an out-of-range row.
    """
    here, per_token = len(self.experts["down"].kernel), self.kind.per_token
    if self.axes:
      chosen = chosen - here * jax.lax.axis_index(self.axes)
      chosen = jnp.where((chosen >= 0) & (chosen < here), chosen, here)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=here + 1)[:here]
    # A token has at most k different experts on a device.
    rows = len(x) * min(per_token, here)
    taken, slot = x[order[:rows] // per_token], jnp.argsort(order)
    if self.axes:
      # Products of rows after the last group are undefined.
      mine = jnp.arange(rows)[:, None] < jnp.sum(sizes)
      taken = jnp.where(mine, taken, 0)
      slot = jnp.where(slot < jnp.sum(sizes), slot, rows)
    multiply = lambda name, x: self.experts[name].grouped(x, sizes)
    return slot.reshape(chosen.shape), _mlp(multiply, taken)

  def _limited(self, x: Array, chosen: Array, valid: Array, limit: int):
    """Like `_dropless`, with at most `limit` tokens of a device per expert.

    Earlier tokens take precedence; padding is dropped.
    """
    count, axes = self.kind.num_experts, self.axes
    ids = jnp.where(valid[:, None], chosen, count).reshape(-1)
    order = jnp.argsort(ids, stable=True)
    sizes = jnp.bincount(ids, length=count + 1)
    starts = jnp.cumsum(sizes) - sizes
    rank = jnp.argsort(order) - starts[ids]
    taken = starts[:-1, None] + jnp.arange(limit)[None]
    present = jnp.arange(limit)[None] < sizes[:-1, None]
    rows = x[order.at[taken].get(mode="clip") // self.kind.per_token]
    rows = jnp.where(present[..., None], rows, 0)
    swap = functools.partial(jax.lax.all_to_all, axis_name=axes, tiled=True)
    if axes:
      rows = swap(rows, split_axis=0, concat_axis=1)
    out = _mlp(lambda name, x: self.experts[name].batched(x), rows)
    if axes:
      out = swap(out, split_axis=1, concat_axis=0)
    kept = (rank < limit) & (ids < count)
    slot = jnp.where(kept, ids * limit + rank, count * limit)
    return slot.reshape(chosen.shape), out.reshape(-1, x.shape[1])


def _mlp(multiply: Callable[..., Array], rows: Array):
  """Applies an MLP, whose products are `multiply(name, rows)`."""
  gate = jax.nn.silu(multiply("gate", rows))
  return multiply("down", gate * multiply("up", rows))


def _combined(out: Array, slot: Array, weights: Array):
  """Returns each token's weighted sum of rows; missing rows count as 0."""
  out = out.at[slot].get(mode="fill", fill_value=0)
  return jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)
