"""Gemma 3 for text: sliding windows, and a norm before and after each block.

Every sixth layer attends to all positions, the others to a window, with a
different rope base. Norms are zero-centered and embeddings scaled by √width.

Reference: Gemma Team 2025, Gemma 3 Technical Report, arXiv 2503.19786.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import families
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import llama
from jaxrl_llm.models.layers import MlpKind

_PERIOD = 6
_LOCAL = "rope_parameters.sliding_attention"  # Without theta.


def _period(config: ModelConfig) -> tuple[Any, ...]:
  numbers = dict(config.extra)
  scale = (config.head_dim / numbers["query_pre_attn_scalar"]) ** 0.5
  full = dataclasses.replace(
    llama.make_layer(config, qk_norm=True, query_scale=scale),
    mlp=MlpKind(bias=False, activation="gelu"),
    output_norms=True,
  )
  attention = dataclasses.replace(
    full.attention,
    window=numbers["sliding_window"],
    rope_theta=numbers["rope_local_base_freq"],
    rope_scaling=None,
  )
  sliding = dataclasses.replace(full, attention=attention)
  return llama.every_nth(config, _PERIOD, full, sliding)


def _respelled(values: Mapping[str, Any]) -> dict[str, Any]:
  """Separates the rope settings of the two layer types."""
  values, ropes = dict(values), values.get("rope_parameters")
  if isinstance(ropes, Mapping) and "full_attention" in ropes:
    values["rope_parameters"] = ropes["full_attention"]
    local = ropes.get("sliding_attention") or {}
    local = dict(local) if isinstance(local, Mapping) else {"rope_type": local}
    theta = values.get("rope_local_base_freq", 10_000.0)
    values["rope_local_base_freq"] = local.pop("rope_theta", theta)
    values[_LOCAL] = local
  return values


def _supported(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
  return {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "layer_types": (llama.layer_types(config, _PERIOD), None),
    "sliding_window_pattern": (_PERIOD, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "tie_word_embeddings": (True, None),
    _LOCAL: ({"rope_type": "default"}, {}, None),
    "quantization_config": (None,),
  }


FAMILY = families.Family(
  architecture="Gemma3ForCausalLM",
  period=_period,
  names=llama.NAMES
  | {
    "attention_norm": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
  },
  supported=_supported,
  fixed={"tie_word_embeddings": True, "mlp_bias": False},
  written={
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window_pattern": _PERIOD,
  },
  extra={
    "sliding_window": (1, 1 << 30),
    "query_pre_attn_scalar": (1, 1 << 20),
    "rope_local_base_freq": (2.0, 1e12),
  },
  respelled=_respelled,
  zero_centered_norms=True,
  embedding_scale=lambda config: config.hidden_size**0.5,
)
