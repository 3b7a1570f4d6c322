"""A run whose policy and critic have experts."""

import dataclasses
import math

import chex
import jax
from helpers import tiny_run

from jaxrl_llm import api, models
from jaxrl_llm.trainer import build

EXTRA = {
  "num_experts": 4,
  "num_experts_per_tok": 2,
  "moe_intermediate_size": 16,
  "router_aux_loss_coef": 0.01,
}


def test_experts_train_and_resume_bit_for_bit(tmp_path):
  model = tiny_run.write_model(tmp_path / "model")
  config = dataclasses.replace(
    tiny_run.model_config(), family="qwen3_moe", extra=tuple(EXTRA.items())
  )
  fns = models.make_policy(config)
  params = jax.jit(fns.init)(jax.random.key(0))
  models.save(str(model), fns, params, tokenizer_from=str(model))
  changes = {"run__steps": 3, "eval__every": 2, "run__trackers": ()}
  config = tiny_run.make_config(model, **changes)
  rows = tiny_run.check_resumes(build.make_run(config), tmp_path)
  for role in ("policy", "value"):
    # Two layers, each at least the coefficient.
    assert rows[-1][f"{role}/balance_loss"] > 2 * 0.0099
    assert math.isfinite(rows[-1][f"{role}/balance_loss"])
  assert rows[-1]["sampler_trainer/logprob_diff_max"] < 1e-4
  found = api.load(tmp_path / "whole").params["layers"]["mlp"]
  moved = jax.tree.map(
    lambda x, y: float(abs(x - y).max()), found, params["layers"]["mlp"]
  )
  assert all(x > 0 for x in jax.tree.leaves(moved))
  chex.assert_tree_all_finite(found)
