"""Layers of the decoder: linear, RMS norm, rotary attention, gated MLP.

Modules hold parameters and arithmetic only. How attention finds its keys
(packed rows, prefill, a decode cache) is handed in as an `attend` function, so
that the trainer and the sampler run one and the same layer.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.config import ModelConfig

# (query [B,T,H,d], key [B,T,K,d], value [B,T,K,d]) -> (out [B,T,H,d], cache)
AttendFn = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

_INIT_STDDEV = 0.02  # Of every kernel and embedding, as GPT-2 and after.


@jax.custom_vjp
def matmul(x: chex.Array, kernel: chex.Array) -> jax.Array:
  """x W for x [..., in] and W [in, out].

  The gradient of W is xᵀ g or (gᵀ x)ᵀ, whichever transposes the narrower of
  the two: a product wants its left factor transposed in memory, and automatic
  differentiation transposes g, fused with all elementwise work behind it. On a
  CPU that alone took a third of the time of a training step.
  """
  return _matmul_fwd(x, kernel)[0]


def _matmul_fwd(x, kernel):
  return _dot(x, kernel, (((x.ndim - 1,), (0,)), ((), ()))), (x, kernel)


def _matmul_bwd(residuals, g):
  x, kernel = residuals
  rows = tuple(range(x.ndim - 1))
  contract = ((rows, rows), ((), ()))
  if kernel.shape[0] <= kernel.shape[1]:
    d_kernel = _dot(x, g, contract)
  else:
    d_kernel = _dot(g, x, contract).T
  return _dot(g, kernel, (((g.ndim - 1,), (1,)), ((), ()))), d_kernel


def _dot(x, y, contract):
  """Product of two factors of one dtype, in that dtype.

  Sums are float32 anyhow. A CPU that has products of bfloat16 factors uses them
  only if it is asked for float32: then they take half the time of float32
  factors, else twice to four times.
  """
  product = jax.lax.dot_general(
    x, y, contract, preferred_element_type=jnp.float32
  )
  return product.astype(x.dtype)


matmul.defvjp(_matmul_fwd, _matmul_bwd)


class Linear(nnx.Module):
  """y = x W (+ b), kernel [in, out], computed in the dtype of x."""

  def __init__(
    self, in_size: int, out_size: int, *, bias: bool, rngs: nnx.Rngs
  ):
    init = nnx.initializers.normal(_INIT_STDDEV)
    self.kernel = nnx.Param(init(rngs.params(), (in_size, out_size)))
    if bias:
      self.bias = nnx.Param(jnp.zeros((out_size,)))
    self.has_bias = bias

  def __call__(self, x: chex.Array) -> jax.Array:
    y = matmul(x, self.kernel[...].astype(x.dtype))
    if self.has_bias:
      y = y + _align(self.bias[...].astype(x.dtype), y.ndim)
    return y


class RMSNorm(nnx.Module):
  """x / sqrt(mean(x²) + ε) · scale, statistics in float32."""

  def __init__(self, size: int, epsilon: float):
    self.scale = nnx.Param(jnp.ones((size,)))
    self.epsilon = epsilon

  def __call__(self, x: chex.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    y = (x32 * jax.lax.rsqrt(variance + self.epsilon)).astype(x.dtype)
    return y * _align(self.scale[...].astype(x.dtype), x.ndim)


class Attention(nnx.Module):
  """Grouped-query attention with rotary positions."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    c = config
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    bias = c.attention_bias
    self.q = Linear(c.hidden_size, q_size, bias=bias, rngs=rngs)
    self.k = Linear(c.hidden_size, kv_size, bias=bias, rngs=rngs)
    self.v = Linear(c.hidden_size, kv_size, bias=bias, rngs=rngs)
    self.o = Linear(
      q_size, c.hidden_size, bias=c.attention_output_bias, rngs=rngs
    )
    if c.qk_norm:
      self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
      self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
    self.config = config

  def __call__(
    self, x: chex.Array, cos: chex.Array, sin: chex.Array, attend: AttendFn
  ) -> tuple[jax.Array, Any]:
    c = self.config
    batch, time, _ = x.shape
    q = self.q(x).reshape(batch, time, c.num_heads, c.head_dim)
    k = self.k(x).reshape(batch, time, c.num_kv_heads, c.head_dim)
    v = self.v(x).reshape(batch, time, c.num_kv_heads, c.head_dim)
    if c.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    out, cache = attend(q, k, v)
    return self.o(out.reshape(batch, time, -1)), cache


class MLP(nnx.Module):
  """down(silu(gate(x)) · up(x))."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    c = config
    sizes = (c.hidden_size, c.intermediate_size)
    self.gate = Linear(*sizes, bias=c.mlp_bias, rngs=rngs)
    self.up = Linear(*sizes, bias=c.mlp_bias, rngs=rngs)
    self.down = Linear(*sizes[::-1], bias=c.mlp_bias, rngs=rngs)

  def __call__(self, x: chex.Array) -> jax.Array:
    return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
  """Pre-norm transformer layer; returns its output and KV cache."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
    self.attention = Attention(config, rngs)
    self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
    self.mlp = MLP(config, rngs)

  def __call__(
    self, x: chex.Array, cos: chex.Array, sin: chex.Array, attend: AttendFn
  ) -> tuple[jax.Array, Any]:
    out, cache = self.attention(self.input_norm(x), cos, sin, attend)
    x = x + out
    return x + self.mlp(self.post_norm(x)), cache


class Embed(nnx.Module):
  """Token embedding [V, D]."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    init = nnx.initializers.normal(_INIT_STDDEV)
    shape = (config.vocab_size, config.hidden_size)
    self.embedding = nnx.Param(init(rngs.params(), shape))

  def __call__(self, tokens: chex.Array, dtype: Any) -> jax.Array:
    return jnp.take(self.embedding[...], tokens, axis=0).astype(dtype)


def rotary_tables(
  positions: chex.Array, frequencies: chex.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
  """Scaled cos and sin of position · frequency, [..., T, 1, d / 2] float32."""
  angles = positions.astype(jnp.float32)[..., None, None] * _align(
    jnp.asarray(frequencies, jnp.float32), positions.ndim + 2
  )
  return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: chex.Array, cos: chex.Array, sin: chex.Array) -> jax.Array:
  """Rotary embedding of x [B, T, heads, d], pairs (i, i + d/2).

  Reference: Su et al. 2021, arXiv 2104.09864, with the half-split pairing of
  the Hugging Face checkpoints.
  """
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x.dtype)


def _align(x: jax.Array, ndim: int) -> jax.Array:
  """Adds leading axes, since the tests forbid silent rank promotion."""
  return x.reshape((1,) * (ndim - x.ndim) + x.shape)
