"""Layers of the decoder: linear, RMS norm, rotary attention, gated MLP.

Modules contain only parameters and arithmetic. Attention over packed rows, a
prefill or a decode cache is passed in as an `attend` function, so that trainer
and sampler run the same layer.

A layer kind is a hashable record. Attention backends and rotary tables are made
for its `attention`, an `AttentionKind`. Its method
`make(config, numerics, rngs)` returns the module of a layer:

  module(x [B,T,D], (cos, sin), attend, routing) -> (x, KV cache, {name: [B,T]})

`routing`, an `experts.Routing`, has properties of the tokens, such as which are
padding. The last result has auxiliary outputs, one number per token. Training
adds them as losses, reduced over tokens like the main loss, or logs their mean
over tokens if their names begin with 'metrics/'. The sampler ignores them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import Rngs
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.models import families
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.numerics import Numerics, matmul
from jaxrl_llm.models.rope import RopeScaling

# (AttentionKind, query [B,T,H,d], key [B,T,K,d], value [B,T,K,d])
#  -> (out [B,T,H,d], cache)
AttendFn = Callable[..., tuple[jax.Array, Any]]
Rotary = tuple[jax.Array, jax.Array]  # cos and sin, see `rotary_tables`.

# Name of the outputs of linear layers, for rematerialization policies.
PRODUCT = "product"
INIT_STDDEV = 0.02  # Standard deviation of kernels and embeddings (GPT-2).


class Matrix(nnx.Module):
  """A kernel [..., in, out], or its codes with their scales."""

  def __init__(self, shape: tuple[int, ...], numerics: Numerics, rngs: Rngs):
    init = nnx.initializers.normal(INIT_STDDEV)
    self.kernel = nnx.Param(init(rngs.params(), shape))
    self.has_scale, self.numerics = False, numerics
    if numerics.quantised:
      self.attach_scale()

  def attach_scale(self) -> None:
    """Adds the scales of a quantised kernel; see `numerics`."""
    *stacks, _, out_size = self.kernel.shape
    self.kernel_scale = nnx.Param(jnp.ones((*stacks, 1, out_size)))
    self.has_scale = True

  def stored(self) -> tuple[jax.Array, jax.Array | None]:
    """Returns the kernel, or its codes and their scales."""
    return self.kernel[...], self.kernel_scale[...] if self.has_scale else None


class Linear(Matrix):
  """y = x W (+ adapter) (+ b), W [in, out], computed in the dtype of x."""

  def __init__(
    self,
    in_size: int,
    out_size: int,
    *,
    bias: bool,
    numerics: Numerics,
    rngs: Rngs,
  ):
    super().__init__((in_size, out_size), numerics, rngs)
    if bias:
      self.bias = nnx.Param(jnp.zeros((out_size,)))
    self.has_bias, self.adapter_scale = bias, None

  def attach_adapter(self, rank: int, scale: float, rngs: Rngs) -> None:
    """Adds a low-rank adapter; see `adapters`."""
    in_size, out_size = self.kernel.shape
    init = nnx.initializers.normal(1 / rank)
    self.lora_a = nnx.Param(init(rngs.params(), (in_size, rank)))
    self.lora_b = nnx.Param(jnp.zeros((rank, out_size)))
    self.adapter_scale = scale

  def __call__(self, x: chex.Array) -> jax.Array:
    y = self.numerics.product(x, *self.stored())
    if self.adapter_scale is not None:
      # Otherwise XLA merges the products with W and A, and concatenates both.
      low = jax.lax.optimization_barrier(x)
      low = matmul(low, self.lora_a[...].astype(x.dtype))
      low = matmul(low, self.lora_b[...].astype(x.dtype))
      y = y + self.adapter_scale * low
    if self.has_bias:
      y = y + _align(self.bias[...].astype(x.dtype), y.ndim)
    return checkpoint_name(y, PRODUCT)


class RMSNorm(nnx.Module):
  """x / sqrt(mean(x²) + ε) · scale, statistics in float32.

  If zero-centered, multiplies by 1 + scale instead, in float32.
  """

  def __init__(self, size: int, epsilon: float, *, zero_centered: bool = False):
    make = jnp.zeros if zero_centered else jnp.ones
    self.scale = nnx.Param(make((size,)))
    self.epsilon = epsilon
    self.zero_centered = zero_centered

  def __call__(self, x: chex.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    y = x32 * jax.lax.rsqrt(variance + self.epsilon)
    if self.zero_centered:
      scale = 1 + self.scale[...].astype(jnp.float32)
      return (y * _align(scale, x.ndim)).astype(x.dtype)
    y = y.astype(x.dtype)
    return y * _align(self.scale[...].astype(x.dtype), x.ndim)


def make_norm(config: ModelConfig, size: int | None = None) -> RMSNorm:
  """Makes a norm of a model, over its width unless `size` is given."""
  centered = families.get(config.family).zero_centered_norms
  size = size or config.hidden_size
  return RMSNorm(size, config.rms_norm_eps, zero_centered=centered)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionKind:
  """Settings of attention that may differ between the layers of a model."""

  num_heads: int  # Query heads.
  num_kv_heads: int
  head_dim: int
  rope_theta: float
  rope_scaling: RopeScaling | None
  bias: bool  # Bias of the q, k and v projections.
  output_bias: bool  # Bias of the o projection.
  qk_norm: bool = False  # RMSNorm of q and k over head_dim, before rope.
  joint_qk_norm: bool = False  # RMSNorm of q and k over all heads, before rope.
  rotary: bool = True  # Whether positions are encoded (otherwise NoPE).
  window: int | None = None  # Positions that a query sees, including its own.
  query_scale: float = 1.0  # Factor of scores on top of 1 / √head_dim.


class Attention(nnx.Module):
  """Grouped-query attention with rotary positions."""

  def __init__(
    self,
    kind: AttentionKind,
    config: ModelConfig,
    numerics: Numerics,
    rngs: Rngs,
  ):
    size, linear = config.hidden_size, {"numerics": numerics, "rngs": rngs}
    q_size = kind.num_heads * kind.head_dim
    kv_size = kind.num_kv_heads * kind.head_dim
    self.q = Linear(size, q_size, bias=kind.bias, **linear)
    self.k = Linear(size, kv_size, bias=kind.bias, **linear)
    self.v = Linear(size, kv_size, bias=kind.bias, **linear)
    self.o = Linear(q_size, size, bias=kind.output_bias, **linear)
    if kind.qk_norm or kind.joint_qk_norm:
      each = (q_size, kv_size) if kind.joint_qk_norm else (kind.head_dim,) * 2
      self.q_norm, self.k_norm = (make_norm(config, size) for size in each)
    self.kind = kind

  def __call__(
    self, x: chex.Array, rotary: Rotary, attend: AttendFn
  ) -> tuple[jax.Array, Any]:
    kind = self.kind
    batch, time, _ = x.shape
    q, k, v = self.q(x), self.k(x), self.v(x)
    if kind.joint_qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    q = q.reshape(batch, time, kind.num_heads, kind.head_dim)
    k, v = (
      y.reshape(batch, time, kind.num_kv_heads, kind.head_dim) for y in (k, v)
    )
    if kind.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    if kind.rotary:
      q, k = rotate(q, *rotary), rotate(k, *rotary)
    if kind.query_scale != 1:
      q = q * kind.query_scale
    out, cache = attend(kind, q, k, v)
    return self.o(out.reshape(batch, time, -1)), cache


ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu": functools.partial(jax.nn.gelu, approximate=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpKind:
  """Settings of a gated MLP."""

  bias: bool
  activation: str = "silu"  # One of `ACTIVATIONS`.

  def make(self, *settings: Any) -> "MLP":
    """Makes the module, from (config, numerics, rngs)."""
    return MLP(self, *settings)


class MLP(nnx.Module):
  """down(activation(gate(x)) · up(x)), without auxiliary outputs."""

  def __init__(
    self, kind: MlpKind, config: ModelConfig, numerics: Numerics, rngs: Rngs
  ):
    sizes = (config.hidden_size, config.intermediate_size)
    linear = {"bias": kind.bias, "numerics": numerics, "rngs": rngs}
    self.gate = Linear(*sizes, **linear)
    self.up = Linear(*sizes, **linear)
    self.down = Linear(*sizes[::-1], **linear)
    self.activation = ACTIVATIONS[kind.activation]

  def __call__(
    self, x: chex.Array, routing: Any
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    del routing  # Tokens are processed independently.
    return self.down(self.activation(self.gate(x)) * self.up(x)), {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderKind:
  """Kind of a layer: attention, then an MLP or experts, each with norms."""

  attention: AttentionKind
  # `MlpKind`, or another record whose `make(config, numerics, rngs)` returns a
  # module: (x [B,T,D], routing) -> (out [B,T,D], auxiliary outputs).
  mlp: Any
  input_norms: bool = True  # Whether inputs are normed.
  output_norms: bool = False  # Whether outputs are normed before being added.

  def make(self, *settings: Any) -> "DecoderLayer":
    """Makes the module of a layer; see the module docstring."""
    return DecoderLayer(self, *settings)


class DecoderLayer(nnx.Module):
  """Transformer layer; returns the auxiliary outputs of its MLP."""

  def __init__(
    self, kind: DecoderKind, config: ModelConfig, numerics: Numerics, rngs: Rngs
  ):
    if kind.input_norms:
      self.input_norm = make_norm(config)
    self.attention = Attention(kind.attention, config, numerics, rngs)
    if kind.input_norms:
      self.post_norm = make_norm(config)
    self.mlp = kind.mlp.make(config, numerics, rngs)
    if kind.output_norms:
      self.attention_norm = make_norm(config)
      self.mlp_norm = make_norm(config)
    self.input_norms = kind.input_norms
    self.output_norms = kind.output_norms

  def __call__(
    self, x: chex.Array, rotary: Rotary, attend: AttendFn, routing: Any
  ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    normed = self.input_norm(x) if self.input_norms else x
    out, cache = self.attention(normed, rotary, attend)
    x = x + (self.attention_norm(out) if self.output_norms else out)
    out, aux = self.mlp(self.post_norm(x) if self.input_norms else x, routing)
    return x + (self.mlp_norm(out) if self.output_norms else out), cache, aux


class Embed(nnx.Module):
  """Token embedding [V, D], times the `embedding_scale` of the family."""

  def __init__(self, config: ModelConfig, rngs: Rngs):
    init = nnx.initializers.normal(INIT_STDDEV)
    shape = (config.vocab_size, config.hidden_size)
    self.embedding = nnx.Param(init(rngs.params(), shape))
    self.factor = families.get(config.family).embedding_scale(config)

  def __call__(self, tokens: chex.Array, dtype: Any) -> jax.Array:
    rows = jnp.take(self.embedding[...], tokens, axis=0)
    if jnp.issubdtype(rows.dtype, jnp.integer):  # See `for_sampling`.
      rows = jax.lax.bitcast_convert_type(rows, dtype)
    rows = rows.astype(dtype)
    return rows if self.factor == 1 else rows * jnp.asarray(self.factor, dtype)


def rotary_tables(
  positions: chex.Array, frequencies: chex.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
  """Returns scaled cos and sin of position · frequency, [..., T, 1, d / 2]."""
  angles = positions.astype(jnp.float32)[..., None, None] * _align(
    jnp.asarray(frequencies, jnp.float32), positions.ndim + 2
  )
  return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: chex.Array, cos: chex.Array, sin: chex.Array) -> jax.Array:
  """Applies the rotary embedding to x [B, T, heads, d], pairs (i, i + d/2).

  Reference: Su et al. 2021, arXiv 2104.09864, with the half-split pairing of
  the Hugging Face checkpoints.
  """
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x.dtype)


def _align(x: jax.Array, ndim: int) -> jax.Array:
  """Adds leading axes, because tests forbid implicit rank promotion."""
  return x.reshape((1,) * (ndim - x.ndim) + x.shape)
