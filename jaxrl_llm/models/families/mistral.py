"""Mistral without sliding windows (since version 0.2): Llama without biases."""

from jaxrl_llm.models.families import llama

FAMILY = llama.FAMILY._replace(
  architecture="MistralForCausalLM",
  supported=lambda config: (
    llama.supported(config) | {"sliding_window": (None,)}
  ),
  fixed={"attention_bias": False, "mlp_bias": False},
  optional=("head_dim",),
  written={"sliding_window": None},
  # An absent key means a window of 4096.
  respelled=lambda values: {"sliding_window": 4096, **values},
)
