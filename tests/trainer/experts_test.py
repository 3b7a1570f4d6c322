"""A run whose policy and critic have experts."""

import math

import chex
import jax
import pytest
from helpers import tiny_experts, tiny_run

from jaxrl_llm import api, models
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build, loop, validation

_LIKELIHOOD = {
  "method__use": ("sft",),
  "data__group_size": 1,
  "data__prompts_per_step": 32,
  "loss__nll_coefficient": 0.0,
  "value__pretrain_steps": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("model") / "experts"
  return tiny_run.write_model(folder, tiny_experts.RUN_CONFIG)


def test_experts_train_and_resume_bit_for_bit(model, tmp_path):
  config = tiny_run.make_config(
    model,
    run__steps=3,
    eval__every=2,
    model__replay_routing=True,
    **tiny_run.EVALUATES_LIKE_A_STEP,
  )
  rows = tiny_run.check_resumes(build.make_run(config), tmp_path)
  for role in ("policy", "value"):
    # About the coefficient times the experts of a token.
    assert rows[-1][f"{role}/balance_loss"] > 2 * 0.495
    assert math.isfinite(rows[-1][f"{role}/balance_loss"])
  assert rows[-1]["sampler_trainer/logprob_diff_max"] < 1e-4
  found = api.load(tmp_path / "whole").params["layers"]["mlp"]
  before = models.load(str(model))[1]["layers"]["mlp"]
  moved = jax.tree.map(lambda x, y: float(abs(x - y).max()), found, before)
  assert all(x > 0 for x in jax.tree.leaves(moved))
  chex.assert_tree_all_finite(found)


def test_folded_experts_with_a_capacity_and_replay_train(model, tmp_path):
  config = tiny_run.make_config(
    model,
    run__steps=2,
    **tiny_run.EVALUATES_LIKE_A_STEP,
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


@pytest.mark.parametrize(
  ("role", "others", "compared"),
  [
    ("policy", {}, True),
    ("value", {"loss__clip_value": 0.2}, True),
    # Nothing that was scored before is compared with an update.
    ("value", {}, False),
    ("policy", _LIKELIHOOD, False),
  ],
)
def test_what_is_dropped_must_be_what_was_when_scored(
  tmp_path, role, others, compared
):
  changes = {"model__expert_capacity": 1.0, f"optimizer__{role}__epochs": 2}
  config = tiny_run.make_config(tmp_path, **changes | others)
  if compared:
    keys = f"model.expert_capacity=1.0 with config.optimizer.{role}.epochs=2"
    with pytest.raises(InputError, match=keys):
      validation.validate(config)
  else:
    validation.validate(config)
