"""OLMo 3: sliding windows, and norms of outputs instead of inputs.

Every fourth layer attends to all positions, the others to a window; only the
former scale rope. Queries and keys are normed over all heads together.

Reference: OLMo Team 2025, Olmo 3; `Olmo3ForCausalLM` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import llama

_PERIOD = 4
_LOCAL = "rope_parameters.sliding_attention"  # Without the theta of all layers.


def _period(config: ModelConfig) -> tuple[Any, ...]:
  full = dataclasses.replace(
    llama.make_layer(config, joint_qk_norm=True),
    input_norms=False,
    output_norms=True,
  )
  window = dict(config.extra)["sliding_window"]
  attention = dataclasses.replace(
    full.attention, window=window, rope_scaling=None
  )
  sliding = dataclasses.replace(full, attention=attention)
  return llama.every_nth(config, _PERIOD, full, sliding)


def _respelled(values: Mapping[str, Any]) -> dict[str, Any]:
  """Separates the rope settings of the two layer types."""
  values, ropes = dict(values), values.get("rope_parameters")
  if isinstance(ropes, Mapping) and "full_attention" in ropes:
    values["rope_parameters"] = full = ropes["full_attention"]
    local = ropes.get("sliding_attention")
    if isinstance(local, Mapping) and isinstance(full, Mapping):
      theta = "rope_theta", full.get("rope_theta")
      local = dict(x for x in local.items() if x != theta)
    values[_LOCAL] = local
  return values


def _spelled(values: Mapping[str, Any]) -> dict[str, Any]:
  """Adds the rope settings of both types, or the theta of one is lost."""
  local = {"rope_type": "default", "rope_theta": values["rope_theta"]}
  ropes = {
    "sliding_attention": local,
    "full_attention": local | (values["rope_scaling"] or {}),
  }
  return {**values, "rope_parameters": ropes}


def _supported(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
  return llama.supported(config) | {
    "layer_types": (llama.layer_types(config, _PERIOD), None),
    _LOCAL: ({"rope_type": "default"}, {}, None),
  }


FAMILY = llama.FAMILY._replace(
  architecture="Olmo3ForCausalLM",
  period=_period,
  names=llama.NAMES
  | {
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
  },
  supported=_supported,
  fixed={"mlp_bias": False},
  optional=("num_key_value_heads", "head_dim"),
  extra={"sliding_window": (1, 1 << 30)},
  respelled=_respelled,
  spelled=_spelled,
)
