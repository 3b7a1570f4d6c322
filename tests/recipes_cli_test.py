"""Recipes at the door: what contradicts itself is refused, the rest trains."""

import inspect
import itertools
import pathlib

import numpy as np
import pytest
from helpers import tiny_run
from helpers.configs import METHODS, keys, load

from jaxrl_llm import config as config_lib
from jaxrl_llm import presets
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.choices import has_critic
from jaxrl_llm.train import build, constraints, loop
from jaxrl_llm.train.validation import validate

ROOT = pathlib.Path(__file__).parents[1]
WINDOWED = {"schedule.window": 16}
GROUPED = {"estimator.name": "group", "value.pretrain_steps": 0}
BATCH = config_lib.batch_size(load("vapo"))
STREAMING = {
  "schedule.streaming": True,
  "loss.nll_coefficient": 0.0,
  "optimizer.policy.mini_batch": BATCH,
  "optimizer.value.mini_batch": BATCH,
}


def changed(changes, base="vapo"):
  config = load(base)
  config.update_from_flattened_dict(changes)
  return config


# (changes of VAPO's config, keys that the refusal names): two settings that
# are fine alone.
CONTRADICTIONS = [
  (
    {"sampler.mesh.fsdp": 2},
    ["sampler.mesh.data=0", "sampler.mesh.fsdp=2"],
  ),
  (
    WINDOWED | GROUPED,
    ["schedule.window=16", "estimator.name='group'"],
  ),
  (
    WINDOWED | {"estimator.name": "reward_to_go", "value.pretrain_steps": 0},
    ["schedule.window=16", "estimator.name='reward_to_go'"],
  ),
  (
    {"schedule.window": 65},
    ["schedule.window=65", "sampler.max_response_length=64", "exceed"],
  ),
  (
    WINDOWED | {"schedule.dynamic_sampling": True},
    ["schedule.window=16", "schedule.dynamic_sampling=True"],
  ),
  (
    {"reward.name": "environment"},
    ["reward.name='environment'", "environment.name=''"],
  ),
  (STREAMING | {"schedule.lag": 1}, ["schedule.streaming=True", "lag=1"]),
  (
    STREAMING | {"run.replay_every": 5},
    ["schedule.streaming=True", "run.replay_every=5", "second update"],
  ),
  (
    STREAMING | {"optimizer.value.epochs": 2},
    ["schedule.streaming=True", "optimizer.value.epochs=2", "one update"],
  ),
  (
    STREAMING | {"estimator.normalize": "whiten"},
    ["schedule.streaming=True", "estimator.normalize='whiten'", "whole batch"],
  ),
  *(
    (
      GROUPED | {"estimator.name": name, "estimator.gamma": 0.9},
      ["estimator.gamma=0.9", f"estimator.name='{name}'", "has no discount"],
    )
    for name in ("group", "token_group", "optimal_baseline")
  ),
  *(
    (
      {"loss.name": name, "loss.dual_clip": 3.0},
      ["loss.dual_clip=3.0", f"loss.name='{name}'", "no dual clip"],
    )
    for name in ("gspo", "cispo", "policy_gradient")
  ),
  (
    STREAMING | {"sampler.drafter": "prompt_lookup"},
    ["sampler.drafter='prompt_lookup'", "schedule.streaming=True"],
  ),
  (
    {"sampler.drafter": "quantized_copy", "schedule.stop": "first_groups"},
    ["sampler.drafter='quantized_copy'", "schedule.stop='first_groups'"],
  ),
  (
    {"environment.name": "calculator", "environment.rewards": "turns"},
    ["environment.rewards='turns'", "reward.name='chain_sum'"],
  ),
  (
    {"schedule.over_provision": 1.5},
    ["schedule.over_provision=1.5", "schedule.stop='all'"],
  ),
  (
    WINDOWED | {"estimator.normalize": "whiten"},
    ["schedule.window=16", "estimator.normalize='whiten'"],
  ),
  (
    WINDOWED | {"estimator.boundary": "zero"},
    ["schedule.window=16", "estimator.boundary='zero'"],
  ),
  (
    WINDOWED | {"estimator.gamma": 0.99},
    ["estimator.boundary='repeat'", "estimator.gamma=0.99"],
  ),
  (
    WINDOWED | {"loss.overlong_filter": True},
    ["schedule.window=16", "loss.overlong_filter=True"],
  ),
  *(
    (
      {
        "estimator.name": name,
        "value.pretrain_steps": 0,
        "data.group_size": 1,
        "data.prompts_per_step": 512,
      },
      ["data.group_size=1", f"estimator.name='{name}'"],
    )
    for name in ("group", "token_group", "reward_to_go", "optimal_baseline")
  ),
  (
    {
      "schedule.dynamic_sampling": True,
      "data.group_size": 1,
      "data.prompts_per_step": 512,
    },
    ["data.group_size=1", "schedule.dynamic_sampling=True"],
  ),
  (
    GROUPED | {"estimator.center": "none"},
    ["estimator.name='group'", "estimator.center='none'"],
  ),
  (
    {"estimator.drop_pivot": True, "estimator.center": "median"},
    ["estimator.drop_pivot=True", "estimator.name='gae'"],
  ),
  (
    GROUPED | {"estimator.drop_pivot": True},
    ["estimator.drop_pivot=True", "estimator.center='mean'"],
  ),
  (
    GROUPED | {"estimator.drop_pivot": True, "estimator.center": "median"},
    ["estimator.drop_pivot=True", "data.group_size=8"],
  ),
  (
    {"estimator.name": "group"},
    ["value.pretrain_steps=12", "estimator.name='group'"],
  ),
  (
    GROUPED | {"value.reward_model_steps": 3},
    ["value.reward_model_steps=3", "estimator.name='group'"],
  ),
  *(
    (
      {"off_policy.correction": kind, "off_policy.proximal": "stored"},
      [f"off_policy.correction='{kind}'", "off_policy.proximal='stored'"],
    )
    for kind in ("truncate", "mask")
  ),
  (
    {"off_policy.proximal": "interpolate", "loss.name": "gspo"},
    ["off_policy.proximal='interpolate'", "loss.name='gspo'"],
  ),
  (
    {"off_policy.proximal": "interpolate", "off_policy.correction": "mask"},
    ["off_policy.proximal='interpolate'", "off_policy.correction='mask'"],
  ),
  (
    {
      "off_policy.proximal": "interpolate",
      "off_policy.correction": "truncate",
      "off_policy.level": "sequence",
    },
    ["off_policy.proximal='interpolate'", "off_policy.level='sequence'"],
  ),
  (
    {"off_policy.correction": "none", "off_policy.proximal": "ewma"},
    ["off_policy.correction='none'", "off_policy.proximal='ewma'"],
  ),
  *(
    (
      {"off_policy.keep_weights": "float32", "schedule.lag": 1, key: value},
      ["off_policy.keep_weights='float32'", f"{key}={value!r}"],
    )
    for key, value in (
      ("off_policy.proximal", "interpolate"),
      ("off_policy.correction", "none"),
      ("schedule.lag", 0),
    )
  ),
  (
    {"loss.name": "gspo", "off_policy.proximal": "ewma"},
    ["loss.name='gspo'", "off_policy.proximal='ewma'"],
  ),
  (
    {"loss.name": "policy_gradient", "off_policy.proximal": "stored"},
    ["loss.name='policy_gradient'", "off_policy.proximal='stored'"],
  ),
  *(
    (
      {"off_policy.ess_scale": True, "off_policy.proximal": name},
      ["off_policy.ess_scale=True", f"off_policy.proximal='{name}'"],
    )
    for name in ("stored", "interpolate")
  ),
  (
    {
      "estimator.name": "optimal_baseline",
      "value.pretrain_steps": 0,
      "off_policy.proximal": "stored",
    },
    ["estimator.name='optimal_baseline'", "off_policy.proximal='stored'"],
  ),
  (
    {"loss.name": "hapo", "off_policy.proximal": "stored"},
    ["loss.name='hapo'", "off_policy.proximal='stored'"],
  ),
  (
    {"sampler.entropy_tau": 0.1, "off_policy.proximal": "stored"},
    ["sampler.entropy_tau=0.1", "off_policy.proximal='stored'"],
  ),
  (
    {"loss.kl_coefficient": 0.1, "loss.kl_reward_coefficient": 0.2},
    ["loss.kl_coefficient=0.1", "loss.kl_reward_coefficient=0.2"],
  ),
  ({"loss.norm": 100}, ["loss.norm=100", "loss.mode='token-mean'"]),
  (
    {"reward.overlong_buffer": 65},
    ["reward.overlong_buffer=65", "sampler.max_response_length=64"],
  ),
]


def refusal(config):
  with pytest.raises(InputError) as error:
    validate(config)
  text = str(error.value)
  assert "\n" not in text and text.startswith("config.")
  return text


class TestRefused:
  @pytest.mark.parametrize(("changes", "parts"), CONTRADICTIONS)
  def test_constraints_name_both_settings(self, changes, parts):
    text = refusal(changed(changes))
    for part in parts:
      assert f"config.{part}" in text or part in text, text

  def test_every_constraint_is_tried(self):
    """The table above breaks each at least once, and nothing else with it."""
    tried, known = set(), set(config_lib.KEYS)
    for changes, _ in CONTRADICTIONS:
      ((keys, why),) = constraints.broken(changed(changes)).items()
      assert set(keys.split(", ")) <= known and "\n" not in why
      tried.add(why)
    source = inspect.getsource(constraints)
    # What sizes and files must be, and what several processes cannot, have
    # tests of their own.
    apart = sum(
      inspect.getsource(topic).count("wrong[")
      for topic in (
        constraints.broken,
        constraints.sizes,
        constraints.files,
        constraints.several_processes,
      )
    )
    assert len(tried) == source.count("wrong[") - apart + 1  # Of the mesh.

  def test_none_holds_by_default(self):
    for method in METHODS:
      assert not constraints.broken(load(method))


class TestConfigs:
  def test_all_methods_are_there(self):
    assert set(METHODS) >= {
      *("vapo", "tppo", "dapo", "grpo", "dr_grpo", "rloo", "ppo", "vc_ppo"),
      *("gspo", "cispo", "hapo", "mc_grpo", "ppo_ewma", "vcpo"),
      *("reinforce_pp", "reinforce_pp_baseline"),
    }

  @pytest.mark.parametrize("method", METHODS)
  def test_is_valid_at_every_scale(self, method):
    for preset in presets.SCALES:
      config = load(method, preset)
      if config.data.source == "jsonl":
        config.data.path = "questions.jsonl"  # These presets ask for it.
      validate(config)
      assert config.is_locked
      assert sorted(keys(config)) == sorted(config_lib.KEYS)
    with pytest.raises(InputError, match="preset 'nope' is unknown"):
      load(method, "nope")

  @pytest.mark.parametrize("method", METHODS)
  def test_warmups_are_twenty_rollouts(self, method):
    found = [load(method, name) for name in presets.SCALES if "qwen" in name]
    for config, role in itertools.product(found, ("policy", "value")):
      if role == "value" and not has_critic(config):
        continue
      optimizer = config.optimizer[role]
      batches = config_lib.batch_size(config) // optimizer.mini_batch
      assert optimizer.warmup_steps == 20 * batches * optimizer.epochs
      # Whoever changes their number, on the command line too.
      optimizer.mini_batch //= 2
      assert optimizer.warmup_steps == 40 * batches * optimizer.epochs
      optimizer.warmup_steps = 3
      assert optimizer.warmup_steps == 3

  @pytest.mark.parametrize(
    ("method", "updates"),
    [("vapo", 320), ("gspo", 80), ("mc_grpo", 40), ("vcpo", 20)],
  )
  def test_warmup_at_32b(self, method, updates):
    optimizer = load(method, "qwen2.5-32b").optimizer
    assert optimizer.policy.warmup_steps == updates


@pytest.mark.slow
class TestTrains:
  @pytest.mark.parametrize("method", METHODS)
  def test_three_steps_from_the_embedded_model(self, method, tmp_path):
    config = load(method)
    prompts = 16 if config.data.group_size == 1 else 4
    batch = prompts * config.data.group_size
    changes = {
      "data.prompts_per_step": prompts,
      "value.pretrain_steps": min(config.value.pretrain_steps, 1),
      "eval.problems": 4,
      "eval.samples": 1,
      "eval.every": 100,
      "checkpoint.every": 100,
      "mesh.data": 1,
      "run.steps": 3,
    }
    if config.schedule.window:  # So that something ends.
      changes["schedule.window"] = 24
    for role in ("policy", "value"):
      # One update or more, as the method has it.
      updates = (
        config_lib.batch_size(config) // config.optimizer[role].mini_batch
      )
      changes[f"optimizer.{role}.mini_batch"] = batch // updates
    config.update_from_flattened_dict(changes)
    run = build.make_run(config)
    loop.train(run, tmp_path)
    rows = tiny_run.comparable(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
      assert all(np.isfinite(value) for value in row.values())
      assert row["policy/grad_norm"] > 0 and row["policy/skipped"] == 0
    trained = [row for row in rows[1:] if "value/loss" in row]
    assert bool(trained) == (run.learner.critic is not None)
    assert all(row["value/skipped"] == 0 for row in trained)
