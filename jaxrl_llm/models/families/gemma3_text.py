"""Gemma 3 for text: sliding windows, and a norm before and after each block.

Every sixth layer attends to all positions, the others to a window, with another
rope base. Norms are zero-centered and embeddings scaled by √width.

Reference: Gemma Team 2025, Gemma 3 Technical Report, arXiv 2503.19786.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import chex
import jax
from flax import nnx

from jaxrl_llm.models import families
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import llama
from jaxrl_llm.models.layers import (
  MLP,
  AttendFn,
  Attention,
  AttentionKind,
  Rotary,
  make_norm,
)
from jaxrl_llm.models.numerics import Numerics

_PERIOD = 6
_TYPES = ("sliding_attention",) * (_PERIOD - 1) + ("full_attention",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaKind:
  """Kind of a layer with four norms."""

  attention: AttentionKind

  def make(self, *settings: Any) -> "GemmaLayer":
    """Makes the module of a layer."""
    return GemmaLayer(self, *settings)


class GemmaLayer(nnx.Module):
  """Attention and a gated MLP, each between two norms."""

  def __init__(
    self,
    kind: GemmaKind,
    config: ModelConfig,
    numerics: Numerics,
    rngs: nnx.Rngs,
  ):
    gelu = functools.partial(jax.nn.gelu, approximate=True)
    linear = {"bias": False, "numerics": numerics, "rngs": rngs}
    self.input_norm = make_norm(config)
    self.attention = Attention(kind.attention, config, numerics, rngs)
    self.post_norm = make_norm(config)
    self.mlp_norm = make_norm(config)
    self.mlp = MLP(config, gelu, **linear)
    self.output_norm = make_norm(config)

  def __call__(
    self,
    x: chex.Array,
    rotary: Rotary,
    attend: AttendFn,
    valid: chex.Array | None,
  ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    del valid
    out, cache = self.attention(self.input_norm(x), rotary, attend)
    x = x + self.post_norm(out)
    return x + self.output_norm(self.mlp(self.mlp_norm(x))), cache, {}


def _layer_types(config: ModelConfig) -> list[str]:
  """Returns the types of all layers; the last period may be cut."""
  return [_TYPES[i % _PERIOD] for i in range(config.num_layers)]


def _period(config: ModelConfig) -> tuple[GemmaKind, ...]:
  own = dict(config.own)
  shared = {
    "num_heads": config.num_heads,
    "num_kv_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "bias": config.attention_bias,
    "output_bias": config.attention_bias,
    "qk_norm": True,
    "query_scale": (config.head_dim / own["query_pre_attn_scalar"]) ** 0.5,
  }
  kinds = {
    "sliding_attention": AttentionKind(
      rope_theta=own["rope_local_base_freq"],
      rope_scaling=None,
      window=own["sliding_window"],
      **shared,
    ),
    "full_attention": AttentionKind(
      rope_theta=config.rope_theta, rope_scaling=config.rope_scaling, **shared
    ),
  }
  whole = config.num_layers % _PERIOD == 0
  types = _TYPES if whole else _layer_types(config)
  return tuple(GemmaKind(attention=kinds[name]) for name in types)


def _respelled(values: Mapping[str, Any]) -> dict[str, Any]:
  """Splits the ropes of both types of layers."""
  values, ropes = dict(values), values.get("rope_parameters")
  if isinstance(ropes, Mapping) and "full_attention" in ropes:
    values["rope_parameters"] = ropes["full_attention"]
    sliding = ropes.get("sliding_attention") or {}
    values["rope_local_base_freq"] = sliding.get("rope_theta", 10_000.0)
  return values


def _supported(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
  return {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "layer_types": (_layer_types(config), None),
    "sliding_window_pattern": (_PERIOD, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
  }


FAMILY = families.Family(
  architecture="Gemma3ForCausalLM",
  period=_period,
  names=llama.NAMES
  | {
    "mlp_norm": "pre_feedforward_layernorm",
    "output_norm": "post_feedforward_layernorm",
  },
  supported=_supported,
  fixed={"tie_word_embeddings": True, "mlp_bias": False},
  written={
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window_pattern": _PERIOD,
  },
  own={
    "sliding_window": (1, 1 << 30),
    "query_pre_attn_scalar": (1, 1 << 20),
    "rope_local_base_freq": (2.0, 1e12),
  },
  respelled=_respelled,
  zero_centered_norms=True,
  embedding_scale=lambda config: config.hidden_size**0.5,
)
