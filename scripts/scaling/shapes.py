"""Chips and models, as their makers state them."""

from typing import NamedTuple

from jaxrl_llm import models


class Chip(NamedTuple):
  """An accelerator.

  Reference: Google Cloud, system architecture of TPU v5e, v5p and v6e.
  """

  memory: float  # Bytes.
  flops: float  # A second, dense bfloat16.
  bandwidth: float  # Of its memory, bytes/s.
  links: float  # To other chips, all links of one together, bytes/s.


# Name of a topology before the colon -> the chip.
CHIPS = {
  "v5e": Chip(16 * 2.0**30, 197e12, 819e9, 200e9),
  "v5p": Chip(95 * 2.0**30, 459e12, 2765e9, 600e9),
  "v6e": Chip(32 * 2.0**30, 918e12, 1640e9, 448e9),
}


def _qwen(width, mlp, layers, heads, kv_heads, vocabulary=152_064, tied=False):
  return models.ModelConfig(
    family="qwen2",
    vocab_size=vocabulary,
    hidden_size=width,
    intermediate_size=mlp,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=128,
    max_position_embeddings=32_768,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    attention_bias=True,
    tie_word_embeddings=tied,
  )


# Name of a preset -> the model that it is for; from the models' config.json.
MODELS = {
  "qwen2.5-1.5b": _qwen(1536, 8960, 28, 12, 2, vocabulary=151_936, tied=True),
  "qwen2.5-7b": _qwen(3584, 18_944, 28, 28, 4),
  "qwen2.5-32b": _qwen(5120, 27_648, 64, 40, 8),
}
