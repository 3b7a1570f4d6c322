"""A plugin family of Llama with experts, and the shipped base in it.

Reference: Komatsuzaki et al. 2022, Sparse Upcycling, arXiv 2212.05055.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm import base_models, models, register
from jaxrl_llm.models.families import llama, qwen3_moe

EXPERTS = 4


def _period(config):
  (dense,) = llama.FAMILY.period(config)
  (experts,) = qwen3_moe.FAMILY.period(config)
  return (dataclasses.replace(dense, mlp=experts.mlp),)


register.family(
  "upcycled",
  qwen3_moe.FAMILY._replace(architecture="UpcycledForCausalLM", period=_period),
)


def write(path):
  """Writes the base of `chain_sum` with four copies of its MLP as experts.

  Each has separate noise of a tenth of the weights; a token uses two.
  """
  base = str(base_models.BASE)
  fns, params = models.load(base)
  config = dataclasses.replace(
    fns.config,
    family="upcycled",
    extra=(
      ("num_experts", EXPERTS),
      ("num_experts_per_tok", 2),
      ("moe_intermediate_size", fns.config.intermediate_size),
      ("router_aux_loss_coef", 0.01),
    ),
  )
  mlp, experts = params["layers"]["mlp"], {}
  for i, (name, layer) in enumerate(sorted(mlp.items())):
    kernel = jnp.stack([layer["kernel"]] * EXPERTS, axis=1)
    noise = jax.random.normal(jax.random.key(i), kernel.shape)
    experts[name] = {"kernel": kernel + 0.1 * jnp.std(kernel) * noise}
  shape = (config.num_layers, config.hidden_size, EXPERTS)
  router = {"kernel": 0.1 * jax.random.normal(jax.random.key(3), shape)}
  layers = params["layers"] | {"mlp": {"router": router, "experts": experts}}
  models.save(
    str(path),
    models.make_policy(config),
    params | {"layers": layers},
    tokenizer_from=base,
  )
