"""Llama, and the many models that use its format."""

from typing import Any

from jaxrl_llm.models import families
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import AttentionKind, DecoderKind, MlpKind

# Components of a parameter's path that have a different name in files.
NAMES = {
  "embed": "model.embed_tokens",
  "layers": "model.layers.{}",
  "final_norm": "model.norm",
  "input_norm": "input_layernorm",
  "attention": "self_attn",
  "post_norm": "post_attention_layernorm",
  **{name: f"{name}_proj" for name in ("q", "k", "v", "o")},
  **{name: f"{name}_proj" for name in ("gate", "up", "down")},
  **{name: "weight" for name in ("embedding", "scale", "kernel")},
}


def make_layer(config: ModelConfig, **differences: Any) -> DecoderKind:
  """Makes the layer kind of a dense model with full attention.

  Args:
    config: the architecture.
    **differences: fields of `AttentionKind` that differ from Llama's.
  """
  own = {"bias": config.attention_bias, "output_bias": config.attention_bias}
  attention = AttentionKind(
    num_heads=config.num_heads,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    rope_theta=config.rope_theta,
    rope_scaling=config.rope_scaling,
    **own | differences,
  )
  return DecoderKind(attention=attention, mlp=MlpKind(bias=config.mlp_bias))


def every_nth(config: ModelConfig, n: int, last: Any, others: Any) -> tuple:
  """Returns a period in which every n-th layer differs from the others.

  It has all layers if their number is no multiple of n.
  """
  count = config.num_layers if config.num_layers % n else n
  return tuple(others if i % n else last for i in range(1, count + 1))


def layer_types(config: ModelConfig, n: int) -> list[str]:
  """Returns the types of all layers, of which every n-th has full attention."""
  return [
    "sliding_attention" if i % n else "full_attention"
    for i in range(1, config.num_layers + 1)
  ]


def supported(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
  """Allows full attention and plain weights; see `Family.supported`."""
  return {
    "hidden_act": ("silu",),
    "layer_types": (["full_attention"] * config.num_layers, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
  }


FAMILY = families.Family(
  architecture="LlamaForCausalLM",
  period=lambda config: (make_layer(config),),
  names=NAMES,
  supported=supported,
  optional=("rope_theta", "num_key_value_heads", "head_dim"),
)
