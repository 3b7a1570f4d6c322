"""Mistral: Llama without biases; every layer may have a sliding window."""

from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import llama


def _window(config: ModelConfig) -> int | None:
  return dict(config.extra).get("sliding_window")


def _supported(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
  kind = "sliding_attention" if _window(config) else "full_attention"
  layer_types = ([kind] * config.num_layers, None)
  return llama.supported(config) | {"layer_types": layer_types}


FAMILY = llama.FAMILY._replace(
  architecture="MistralForCausalLM",
  period=lambda config: (llama.make_layer(config, window=_window(config)),),
  supported=_supported,
  fixed={"attention_bias": False, "mlp_bias": False},
  optional=("head_dim", "sliding_window"),
  written={"sliding_window": None},
  extra={"sliding_window": (1, 1 << 30)},
  # An absent key means a window of 4096, and null none (since version 0.2).
  respelled=lambda values: {"sliding_window": 4096, **values},
)
