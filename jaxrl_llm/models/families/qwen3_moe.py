"""Qwen3 with experts in every layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import chex
import jax
from flax import nnx

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.experts import Experts, ExpertsKind
from jaxrl_llm.models.families import llama, qwen3
from jaxrl_llm.models.layers import (
  AttendFn,
  Attention,
  AttentionKind,
  Rotary,
  make_norm,
)
from jaxrl_llm.models.numerics import Numerics


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeKind:
  """Kind of a pre-norm layer: attention, then experts."""

  attention: AttentionKind
  experts: ExpertsKind

  def make(self, *settings: Any) -> "MoeLayer":
    """Makes the module of a layer."""
    return MoeLayer(self, *settings)


class MoeLayer(nnx.Module):
  """Pre-norm layer; its auxiliary output is the load-balancing loss."""

  def __init__(
    self,
    kind: MoeKind,
    config: ModelConfig,
    numerics: Numerics,
    rngs: nnx.Rngs,
  ):
    self.input_norm = make_norm(config)
    self.attention = Attention(kind.attention, config, numerics, rngs)
    self.post_norm = make_norm(config)
    self.mlp = Experts(kind.experts, config, numerics, rngs)

  def __call__(
    self,
    x: chex.Array,
    rotary: Rotary,
    attend: AttendFn,
    valid: chex.Array | None,
  ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    out, cache = self.attention(self.input_norm(x), rotary, attend)
    x = x + out
    out, aux = self.mlp(self.post_norm(x), valid)
    return x + out, cache, aux


def _period(config: ModelConfig) -> tuple[MoeKind, ...]:
  own = dict(config.own)
  experts = ExpertsKind(
    num_experts=own["num_experts"],
    per_token=own["num_experts_per_tok"],
    intermediate_size=own["moe_intermediate_size"],
    balance=own["router_aux_loss_coef"],
  )
  attention = llama.make_layer(config, qk_norm=True).attention
  return (MoeKind(attention=attention, experts=experts),)


def _respelled(values: Mapping[str, Any]) -> dict[str, Any]:
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
    }
  ),
  written={"norm_topk_prob": True, "decoder_sparse_step": 1},
  own={
    "num_experts": (1, 4096),
    "num_experts_per_tok": (1, 4096),
    "moe_intermediate_size": (1, 1 << 20),
    "router_aux_loss_coef": (0.0, 1e3),
  },
  respelled=_respelled,
)
