"""SmolLM3: Llama in which every fourth layer encodes no positions (NoPE).

Reference: Yang et al. 2025, Rope to Nope and Back Again, arXiv 2501.18795.
"""

from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import llama

_PERIOD = 4


def _period(config: ModelConfig) -> tuple[Any, ...]:
  make = lambda rotary: llama.make_layer(config, rotary=rotary)
  return llama.every_nth(config, _PERIOD, make(False), make(True))


def _have_rope(count: int) -> list[int]:
  """Returns 1 for each of the first layers that encodes positions, else 0."""
  return [int((i + 1) % _PERIOD > 0) for i in range(count)]


def _supported(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
  return llama.supported(config) | {
    "no_rope_layers": (_have_rope(config.num_layers), None),
    "no_rope_layer_interval": (_PERIOD, None),
  }


FAMILY = llama.FAMILY._replace(
  architecture="SmolLM3ForCausalLM",
  period=_period,
  supported=_supported,
  optional=("head_dim",),
  written={"no_rope_layer_interval": _PERIOD},
  # Unlike Llama's, its files may omit the key if embeddings are tied.
  respelled=lambda values: {"tie_word_embeddings": True, **values},
)
