"""Shapes of the models that presets train."""

from typing import Any

from jaxrl_llm.models import ModelConfig


def _qwen(
  width: int, mlp: int, layers: int, heads: int, kv_heads: int, **other: Any
) -> ModelConfig:
  shape = {
    "family": "qwen2",
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "attention_bias": True,
  }
  return ModelConfig(
    hidden_size=width,
    intermediate_size=mlp,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    **shape | other,
  )


# Models by the name of the preset that trains them.
MODELS = {
  "qwen2.5-1.5b": _qwen(1536, 8960, 28, 12, 2, tie_word_embeddings=True),
  "qwen2.5-7b": _qwen(3584, 18_944, 28, 28, 4, vocab_size=152_064),
  "qwen2.5-32b": _qwen(5120, 27_648, 64, 40, 8, vocab_size=152_064),
  "one-gpu-0.5b": _qwen(
    *(896, 4864, 24, 14, 2), tie_word_embeddings=True, head_dim=64
  ),
  "qwen3-30b-a3b": _qwen(
    *(2048, 6144, 48, 32, 4),
    family="qwen3_moe",
    attention_bias=False,
    max_position_embeddings=40_960,
    extra=(
      ("num_experts", 128),
      ("num_experts_per_tok", 8),
      ("moe_intermediate_size", 768),
      ("router_aux_loss_coef", 0.001),
    ),
  ),
}
MODELS["one-gpu-1.5b"] = MODELS["qwen2.5-1.5b"]
MODELS["qwen2.5-7b-lora"] = MODELS["qwen2.5-7b"]
