"""Qwen3 with experts in every layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.experts import ExpertsKind
from jaxrl_llm.models.families import llama, qwen3


def _period(config: ModelConfig) -> tuple[Any, ...]:
  numbers = dict(config.extra)
  experts = ExpertsKind(
    num_experts=numbers["num_experts"],
    per_token=numbers["num_experts_per_tok"],
    intermediate_size=numbers["moe_intermediate_size"],
    balance=numbers["router_aux_loss_coef"],
  )
  (dense,) = qwen3.FAMILY.period(config)
  return (dataclasses.replace(dense, mlp=experts),)


def _respelled(values: Mapping[str, Any]) -> dict[str, Any]:
  """Accepts the name that newer releases of transformers write."""
  return {"num_experts": values.get("num_local_experts"), **values}


FAMILY = qwen3.FAMILY._replace(
  architecture="Qwen3MoeForCausalLM",
  period=_period,
  names=llama.NAMES | {"router": "gate", "experts": "experts.{}"},
  supported=lambda config: (
    llama.supported(config)
    | {
      "norm_topk_prob": (True,),
      "decoder_sparse_step": (1, None),
      "mlp_only_layers": ([], None),
      "num_experts_per_tok": range(dict(config.extra)["num_experts"], 0, -1),
    }
  ),
  written={"norm_topk_prob": True, "decoder_sparse_step": 1},
  extra={
    "num_experts": (1, 4096),
    "num_experts_per_tok": (1, 4096),
    "moe_intermediate_size": (1, 1 << 20),
    "router_aux_loss_coef": (0.0, 1e3),
  },
  respelled=_respelled,
)
