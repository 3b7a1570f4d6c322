"""Qwen3: Llama with norms of queries and keys before rope."""

from jaxrl_llm.models.families import llama

FAMILY = llama.FAMILY._replace(
  architecture="Qwen3ForCausalLM",
  period=lambda config: (llama.make_layer(config, qk_norm=True),),
  fixed={"mlp_bias": False},
  optional=(),
)
