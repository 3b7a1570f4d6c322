"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from jaxrl_llm.models.families import llama

FAMILY = llama.FAMILY._replace(
  architecture="Qwen2ForCausalLM",
  period=lambda config: (llama.make_layer(config, output_bias=False),),
  fixed={"attention_bias": True, "mlp_bias": False},
  optional=("head_dim",),
)
