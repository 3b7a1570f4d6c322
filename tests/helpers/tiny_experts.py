"""A tiny model with four experts, two of which each token uses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import tiny, tiny_run

from jaxrl_llm import models
from jaxrl_llm.models import experts
from jaxrl_llm.models.numerics import FLOAT32

LOGITS = np.array(
  [[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 1.0], [1.0, 1.0, 1.0, 1.1]],
  np.float32,
)
EXTRA = {
  "num_experts": 4,
  "num_experts_per_tok": 2,
  "moe_intermediate_size": 12,
  "router_aux_loss_coef": 0.5,
}
CONFIG, RUN_CONFIG = (  # RUN_CONFIG is that of a tiny run.
  dataclasses.replace(
    config,
    family="qwen3_moe",
    attention_bias=False,
    extra=tuple(EXTRA.items()),
  )
  for config in (tiny.tiny_config(), tiny_run.model_config())
)


def make(*, logits=None, balance=1.0):
  """Makes experts of width 4; with `logits`, the router returns its input."""
  kind = experts.ExpertsKind(
    num_experts=4, per_token=2, intermediate_size=3, balance=balance
  )
  config = dataclasses.replace(CONFIG, hidden_size=4)
  module = experts.Experts(kind, config, FLOAT32, nnx.Rngs(0))
  for name in ("gate", "up", "down"):
    kernel = module.experts[name].kernel
    noise = jax.random.normal(jax.random.key(1), kernel.shape)
    module.experts[name].kernel = nnx.Param(noise)
  if logits is not None:
    module.router.kernel = nnx.Param(jnp.eye(4))
  return module


def rows(count=4):
  tokens = (
    np.random.default_rng(0).integers(0, 67, (count, 12)).astype(np.int32)
  )
  lengths = np.resize([12, 9, 12, 5], (count, 1))
  inside = np.arange(12)[None] < lengths
  return models.PackedRows(
    tokens=tokens,
    segments=inside.astype(np.int32),
    positions=np.tile(np.arange(12, dtype=np.int32), (count, 1)),
    targets=np.roll(tokens, -1, axis=1),
    mask=np.arange(12)[None] < lengths - 1,
  )


@functools.cache
def make_model():
  fns = models.make_policy(CONFIG, head_chunk=8)
  make = lambda key: tiny.widen(fns.init(key), jax.random.fold_in(key, 1))
  return fns, jax.jit(make)(jax.random.key(0))
