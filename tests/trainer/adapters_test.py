"""Runs that train adapters: checkpoints, a shared base, export, meshes."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from helpers import tiny_experts, tiny_run

from jaxrl_llm import api, digest, models, sharding, sync, workdir
from jaxrl_llm.checkpoint import commit
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import adapters
from jaxrl_llm.trainer import build, loop, model_fns
from jaxrl_llm.trainer.meshes import Meshes

STEPS = 3


def make_run(model, **changes):
  settings = {
    "model__lora_rank": 4,
    "value__lora_rank": 2,
    "loss__kl_reward_coefficient": 0.01,
    "optimizer__policy__learning_rate": 1e-2,
    "run__steps": STEPS,
    **tiny_run.EVALUATES_LIKE_A_STEP,
  }
  return build.make_run(tiny_run.make_config(model, **settings | changes))


@pytest.fixture(scope="module")
def run(model):
  return make_run(model)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole")
  loop.train(run, folder)
  return folder


def test_a_step_holds_adapters_and_one_base_is_written_once(whole):
  folder = whole / "checkpoints"
  base, step = (commit.read(folder / x)["leaves"] for x in ("base", str(STEPS)))
  assert base and all(x.startswith("learner.policy.base/") for x in base)
  weights = [x for x in step if x.endswith(("kernel", "embedding", "scale"))]
  assert weights and all("value_head" in x or "surprise" in x for x in weights)
  for name in ("policy", "critic"):
    assert f"learner.{name}.trained/layers/mlp/up/lora_a" in step


def test_policy_critic_and_reference_share_a_base(run):
  states, _ = loop.begin(run)
  learner = states.learner
  policy, critic = learner.params("policy"), learner.params("critic")
  assert jax.tree.all(
    jax.tree.map(lambda x, y: x is y, policy.base, critic.base)
  )
  size = sum(x.size for x in jax.tree.leaves(policy.base))
  assert models.num_params(run.learner.policy.fns.config.base) == size
  chex.assert_trees_all_equal_structs(learner.reference, policy.trained)


def test_readers_get_the_merged_model(run, whole, model, tmp_path):
  policy = api.load(whole)
  _, before = models.load(str(model))
  chex.assert_trees_all_equal(policy.params["embed"], before["embed"])
  moved = lambda x, y: float(np.abs(x - y).max())
  moved = jax.tree.map(moved, policy.params["layers"], before["layers"])
  assert moved["mlp"]["up"]["kernel"] > 1e-3
  assert moved["input_norm"]["scale"] == 0
  policy.save(tmp_path / "merged")
  again = api.load(tmp_path / "merged")
  chex.assert_trees_all_equal(again.params, policy.params)
  given = {"temperature": 0, "max_new_tokens": 8}
  assert again.generate("3+5?", **given) == policy.generate("3+5?", **given)
  policy.save_adapters(tmp_path / "adapters")
  assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
  with pytest.raises(InputError, match="has no adapters"):
    again.save_adapters(tmp_path / "none")
  critic = run.learner.critic
  found = workdir.restore_params(whole, STEPS, "critic", critic.params)
  chex.assert_trees_all_equal_structs(found, models.merge(critic.params))


def test_a_mesh_computes_what_one_device_does(model, whole, tmp_path):
  run = make_run(model, run__steps=1, **tiny_run.EIGHT_DEVICES)
  loop.train(run, tmp_path)
  one, eight = tiny_run.comparable(whole), tiny_run.comparable(tmp_path)
  for key in ("policy/loss", "value/loss", "policy/grad_norm"):
    np.testing.assert_allclose(one[1][key], eight[1][key], rtol=1e-3)


@pytest.mark.parametrize("base_dtype", ["float32", "nf4"])
def test_only_adapters_are_sent_again(model, base_dtype):
  run = make_run(model, model__base_dtype=base_dtype)
  states, first = loop.begin(run)
  params = states.learner.params("policy")
  trained = jax.tree.map(lambda x: x + 0.1, params.trained)
  params = params._replace(trained=trained)
  second = run.transfer.send(params, 1, replaces=first)
  names, leaves = digest.named_leaves(second.params)
  old = jax.tree.leaves(first.params)
  sent = {n for n, x, y in zip(names, leaves, old) if x is not y}
  assert sent == {n for n in names if n.endswith(adapters.FACTORS)}
  size = sum(x.nbytes for n, x in zip(names, leaves) if n in sent)
  assert size == sum(x.nbytes for x in jax.tree.leaves(trained))
  assert not any(x.is_deleted() for n, x in zip(names, old) if n not in sent)
  wanted = run.transfer.checksums(params)
  sync.verify(second, wanted, version=1)
  assert run.parity_check(params, second) <= 1e-5
  # A change of the base is detected.
  layer = second.params["layers"][0]
  norm = {"scale": layer["input_norm"]["scale"] * 2}
  layers = (layer | {"input_norm": norm}, *second.params["layers"][1:])
  wrong = dataclasses.replace(second, params=second.params | {"layers": layers})
  with pytest.raises(sync.SyncError, match="input_norm/scale"):
    sync.verify(wrong, wanted, version=1)


def test_a_four_bit_base_trains_and_resumes(model, tmp_path):
  half, whole = tmp_path / "parts", tmp_path / "whole"
  run = make_run(model, model__base_dtype="nf4", eval__every=2)
  tiny_run.check_resumes(run, tmp_path)
  base = commit.read(half / "checkpoints" / "base")["leaves"]
  assert "learner.policy.base/layers/mlp/up/kernel_scale" in base
  chex.assert_trees_all_equal(api.load(half).params, api.load(whole).params)


@pytest.mark.parametrize(
  "changes, problem",
  [
    ({"model__base_dtype": "nf4", "model__matmul": "fp8"}, "a quantised base"),
    ({"model__base_dtype": "int8", "value__lora_rank": 0}, "base_dtype"),
    ({"optimizer__policy__frozen": ("embed",)}, "leave frozen empty"),
    ({"model__lora_targets": ()}, "name a target"),
    ({"value__init_from": "elsewhere"}, "value.init_from=''"),
    # No layer has this target.
    ({"model__lora_targets": ("atention",)}, "lora_targets.*attention/q"),
  ],
)
def test_what_does_not_go_together_is_refused(model, changes, problem):
  with pytest.raises(InputError, match=problem) as error:
    make_run(model, **changes)
  assert "\n" not in str(error.value)


def test_a_target_that_gives_no_layer_an_adapter_is_refused(model):
  targets = {"model__lora_targets": ("mlp",)}  # Not the router.
  config = tiny_run.make_config(model, model__lora_rank=2, **targets)
  mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1)
  with pytest.raises(InputError, match="no layer .* would have an adapter"):
    model_fns.make_policy_fns(config, tiny_experts.CONFIG, Meshes(mesh, mesh))
