"""Mixture of experts: a router, and gated MLPs of which a token uses k.

Dispatch is dropless: the copies of tokens are sorted by expert and multiplied
in groups, whatever their sizes, so that no token depends on others.

References:
  Fedus et al. 2022, Switch Transformers, arXiv 2101.03961 (load balancing).
  Gale et al. 2023, MegaBlocks, arXiv 2211.15841 (dropless experts).
"""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.grouped import grouped_matmul
from jaxrl_llm.models.layers import INIT_STDDEV, Linear
from jaxrl_llm.models.numerics import Numerics


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


class Grouped(nnx.Module):
  """y_i = x_i W of the expert of row i, kernel [E, in, out]."""

  def __init__(self, experts: int, in_size: int, out_size: int, rngs: nnx.Rngs):
    init = nnx.initializers.normal(INIT_STDDEV)
    shape = (experts, in_size, out_size)
    self.kernel = nnx.Param(init(rngs.params(), shape))
    self.has_scale = False

  def attach_scale(self) -> None:
    """Adds the scales of a quantised kernel; see `adapters`."""
    experts, _, out_size = self.kernel.shape
    self.kernel_scale = nnx.Param(jnp.ones((experts, 1, out_size)))
    self.has_scale = True

  def __call__(self, x: chex.Array, sizes: chex.Array) -> jax.Array:
    """Multiplies rows [N, in], sorted by expert; sizes [E] sum to N."""
    kernel = self.kernel[...].astype(x.dtype)
    dtype = jnp.float32 if self.has_scale else x.dtype
    y = grouped_matmul(x, kernel, sizes, dtype)
    if self.has_scale:
      scale = self.kernel_scale[...][:, 0]
      y *= jnp.repeat(scale, sizes, axis=0, total_repeat_length=len(x))
    return y.astype(x.dtype)


class Experts(nnx.Module):
  """Σ w_e MLP_e(x) over the k most probable experts, with Σ w_e = 1."""

  def __init__(
    self,
    kind: ExpertsKind,
    config: ModelConfig,
    numerics: Numerics,
    rngs: nnx.Rngs,
  ):
    width, inner = config.hidden_size, kind.intermediate_size
    experts = kind.num_experts
    self.router = Linear(
      width, experts, bias=False, numerics=numerics, rngs=rngs
    )
    self.experts = nnx.Dict(
      gate=Grouped(experts, width, inner, rngs),
      up=Grouped(experts, width, inner, rngs),
      down=Grouped(experts, inner, width, rngs),
    )
    self.kind = kind

  def __call__(
    self, x: chex.Array, valid: chex.Array | None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Applies the experts.

    Args:
      x: [B, T, D].
      valid: bool [B, T], tokens that count for the load; None: all.

    Returns:
      [B, T, D], and the load-balancing loss of each token, float32 [B, T]:
      balance · E Σ_e f_e p_e, where p is the token's distribution over experts
      and f_e the share of all choices that fell on expert e.
    """
    kind, tokens = self.kind, x.reshape(-1, x.shape[-1])
    count, experts = len(tokens), kind.num_experts
    probs = jax.nn.softmax(self.router(tokens).astype(jnp.float32))
    weights, chosen = jax.lax.top_k(probs, kind.per_token)
    weights /= jnp.sum(weights, axis=-1, keepdims=True)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=experts)
    rows = tokens[order // kind.per_token]
    gate = jax.nn.silu(self.experts["gate"](rows, sizes))
    out = self.experts["down"](gate * self.experts["up"](rows, sizes), sizes)
    out = out[jnp.argsort(order)].reshape(count, kind.per_token, -1)
    out = jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)
    counted = jnp.ones((count,), bool) if valid is None else valid.reshape(-1)
    counted = jnp.repeat(counted, kind.per_token).astype(jnp.float32)
    load = jnp.bincount(chosen.reshape(-1), weights=counted, length=experts)
    load /= jnp.maximum(jnp.sum(load), 1)
    balance = kind.balance * experts * jnp.sum(load[None] * probs, axis=-1)
    return out.reshape(x.shape), {"balance": balance.reshape(x.shape[:2])}
