"""A run that trains only a part of its parameters.

pairs_test.py resumes such runs.
"""

import os
from unittest import mock

import chex
import jax
import pytest
from helpers import tiny_run

from jaxrl_llm import api, checkpoint, models, workdir
from jaxrl_llm.checkpoint import commit
from jaxrl_llm.models.files import hf
from jaxrl_llm.trainer import build, loop
from jaxrl_llm.trainer.value_pretraining import FOLDER

STEPS = 3


@pytest.fixture(scope="module")
def run(model):
  settings = {
    "optimizer__policy__frozen": ("embed",),
    "optimizer__value__frozen": ("layers/mlp",),
    "loss__kl_reward_coefficient": 0.01,
    "value__reward_model_steps": 1,
    "run__steps": STEPS,
  }
  return build.make_run(tiny_run.make_config(model, **settings))


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
  """An uninterrupted run, and how often it read the model's weights."""
  folder = tmp_path_factory.mktemp("whole")
  with mock.patch.object(hf, "read_params", wraps=hf.read_params) as read:
    loop.train(run, folder)
  return folder, read.call_count


def test_the_reference_is_loaded_once_for_all_learners(run, whole):
  # Once for the policy and once for the three learners with a KL reward.
  assert whole[1] == 2
  states, _ = loop.begin(run)
  reference, params = states.learner.reference, states.learner.params("policy")
  assert reference.keys() == params.trained.keys() and "embed" in params.base
  chex.assert_trees_all_equal(*jax.device_get((reference, params.trained)))


def test_a_step_holds_what_is_trained_and_the_rest_is_written_once(whole):
  folder = whole[0] / "checkpoints"
  base, step = (commit.read(folder / x)["leaves"] for x in ("base", str(STEPS)))
  assert {x for x in base if "policy" in x} == {
    "learner.policy.base/embed/embedding"
  }
  mlp = "learner.critic.{}/layers/mlp/up/kernel".format
  assert mlp("base") in base and mlp("trained") not in step
  assert not any("embed" in x for x in step if ".policy." in x)
  # The critic's embedding is trained and has moments.
  assert "learner.critic.trained/embed/embedding" in step
  assert any("critic.optimizer" in x and "embed" in x for x in step)
  written = lambda name: os.stat(folder / name / "COMMIT").st_mtime_ns
  assert written("base") < written(str(STEPS - 1)) < written(str(STEPS))


def test_readers_find_all_parameters(run, whole, model):
  folder, _ = whole
  policy = api.load(folder)
  _, before = models.load(str(model))
  chex.assert_trees_all_equal(policy.params["embed"], before["embed"])
  moved = jax.tree.map(lambda x, y: bool((x != y).any()), policy.params, before)
  assert all(jax.tree.leaves(moved["layers"]))
  critic = run.learner.critic.params
  pretrained = checkpoint.load_tree(folder / FOLDER, models.merge(critic))
  last = workdir.restore_params(folder, STEPS, "critic", critic)
  chex.assert_trees_all_equal(
    *jax.device_get((pretrained["layers"]["mlp"], last["layers"]["mlp"]))
  )
