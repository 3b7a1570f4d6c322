"""Parameters used per token."""

from jaxrl_llm.models import experts
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import num_params


def multiplied_params(config: ModelConfig) -> int:
  """Returns the number of parameters that a token is multiplied by.

  Embeddings are looked up, so they count only if they are also the head. Of the
  experts, only those that a token uses count.
  """
  table = 0 if config.tie_word_embeddings else config.vocab_size
  used = num_params(config) - table * config.hidden_size
  for kind in experts.kinds(config):
    idle = 1 - kind.per_token / kind.num_experts
    used -= round(idle * expert_params(config, kind))
  return used


def expert_params(config: ModelConfig, kind: experts.ExpertsKind) -> int:
  """Returns the number of parameters of the experts of a layer."""
  width = config.hidden_size * kind.intermediate_size
  return 3 * kind.num_experts * width
