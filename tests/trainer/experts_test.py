"""A run whose policy and critic have experts."""

import dataclasses
import math

import chex
import jax
from helpers import tiny_run

from jaxrl_llm import api, models
from jaxrl_llm.trainer import build, loop

EXTRA = {
  "num_experts": 4,
  "num_experts_per_tok": 2,
  "moe_intermediate_size": 16,
  "router_aux_loss_coef": 0.01,
}


def write_model(path):
  """Writes a model; returns its path and parameters."""
  model = tiny_run.write_model(path)
  config = dataclasses.replace(
    tiny_run.model_config(), family="qwen3_moe", extra=tuple(EXTRA.items())
  )
  fns = models.make_policy(config)
  params = jax.jit(fns.init)(jax.random.key(0))
  models.save(str(model), fns, params, tokenizer_from=str(model))
  return model, params


def test_experts_train_and_resume_bit_for_bit(tmp_path):
  model, params = write_model(tmp_path / "model")
  config = tiny_run.make_config(
    model, run__steps=3, eval__every=2, model__replay_routing=True
  )
  rows = tiny_run.check_resumes(build.make_run(config), tmp_path)
  for role in ("policy", "value"):
    # At least the coefficient in each of two layers.
    assert rows[-1][f"{role}/balance_loss"] > 2 * 0.0099
    assert math.isfinite(rows[-1][f"{role}/balance_loss"])
  assert rows[-1]["sampler_trainer/logprob_diff_max"] < 1e-4
  found = api.load(tmp_path / "whole").params["layers"]["mlp"]
  moved = jax.tree.map(
    lambda x, y: float(abs(x - y).max()), found, params["layers"]["mlp"]
  )
  assert all(x > 0 for x in jax.tree.leaves(moved))
  chex.assert_tree_all_finite(found)


def test_folded_experts_with_a_capacity_and_replay_train(tmp_path):
  model = write_model(tmp_path / "model")[0]
  config = tiny_run.make_config(
    model,
    run__steps=2,
    mesh__data=1,
    mesh__fsdp=2,
    mesh__tensor=2,
    mesh__expert=4,
    model__expert_capacity=1.0,
    model__replay_routing=True,
  )
  loop.train(build.make_run(config), tmp_path / "run")
  row = tiny_run.comparable(tmp_path / "run")[-1]
  for role in ("policy", "value"):
    assert 1 <= row[f"{role}/expert_load"] <= 4 / 2
    assert 0 < row[f"{role}/expert_dropped"] < 1
  assert math.isfinite(row["policy/loss"])
