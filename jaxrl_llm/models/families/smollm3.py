"""SmolLM3: Llama in which every fourth layer encodes no positions (NoPE).

Reference: Yang et al. 2025, Rope to Nope and Back Again, arXiv 2501.18795.
"""

from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import llama

_PERIOD = 4


def _period(config: ModelConfig) -> tuple[Any, ...]:
  with_rope = llama.make_layer(config)
  return (with_rope,) * 3 + (llama.make_layer(config, rotary=False),)


def _supported(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
  layers = [1, 1, 1, 0] * (config.num_layers // _PERIOD)
  return llama.supported(config) | {
    "no_rope_layers": (layers, None),
    "no_rope_layer_interval": (_PERIOD, None),
  }


FAMILY = llama.FAMILY._replace(
  architecture="SmolLM3ForCausalLM",
  period=_period,
  supported=_supported,
  optional=("head_dim",),
  written={"no_rope_layer_interval": _PERIOD},
)
