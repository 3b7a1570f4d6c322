"""Kept weights separate the sampler's mismatch from staleness."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_run
from helpers.tiny_algorithm import make_algorithm, make_rollout, noise
from helpers.tiny_run import make_run
from helpers.tiny_tppo import record

from jaxrl_llm import sharding
from jaxrl_llm.errors import InputError
from jaxrl_llm.methods import kept_weights
from jaxrl_llm.trainer.workdir import Workdir

KEEP = {"method__use": ("kept_weights",)}
LATE = {"estimator__name": "group", "schedule__lag": 2}
# Tokens of several versions in one batch and in one response.
MIXED = {
  "estimator__name": "group",
  "schedule__stop": "first_groups",
  "schedule__over_provision": 2.0,
  "schedule__max_staleness": 2,
  "sampler__slots": 16,
  "sampler__max_response_length": 40,
}
FAST = {"optimizer__policy__learning_rate": 3e-2}
STEPS = 6


@pytest.fixture(scope="module")
def run(model):
  """A run whose policy changes fast, so that older weights clearly differ."""
  return make_run(model, **KEEP | FAST | MIXED | LATE)


@pytest.fixture(scope="module")
def history(run):
  return record(run, STEPS)[0]


def seen(step):
  """Returns (experience of an update, its scores, its rollout)."""
  (estimated,) = step.estimated
  return estimated.experience, estimated.scores, estimated.rollout


class TestWriterLogprobs:
  def test_are_those_of_the_sampler(self, history):
    """They are from the same weights, hence equal up to rounding."""
    moved, versions = [], []
    for step in history:
      experience, scores, rollout = seen(step)
      mask = experience["policy_mask"]
      behavior = rollout.behavior_logprobs[mask]
      wrote, old = scores["writer_logprobs"][mask], scores["old_logprobs"][mask]
      np.testing.assert_allclose(wrote, behavior, atol=2e-4)
      moved.append(np.abs(old - behavior).max())
      versions.append(np.unique(rollout.version[mask]).size)
      # Other tokens have the log-probs of the current policy.
      np.testing.assert_array_equal(
        scores["writer_logprobs"][~mask], scores["old_logprobs"][~mask]
      )
    assert max(moved) > 0.05  # The current policy differs.
    assert max(versions) > 1 and history[-1].row["staleness/max"] >= 1


class TestCorrections:
  def inputs(self, old, writer, behavior):
    """Makes inputs for tokens of one response from probabilities."""
    log = lambda x: np.log(np.asarray([x], np.float32))
    return {
      "proximal_logprobs": log(old),
      "writer_logprobs": log(writer),
      "behavior_logprobs": log(behavior),
      "policy_mask": np.ones((1, len(old)), bool),
    }

  def make(self, **changes):
    changes = {"off_policy__correction": "truncate"} | changes
    return make_algorithm(schedule__lag=1, **KEEP | changes)

  def test_each_has_its_bound(self):
    made = self.make(
      off_policy__high=4.0, method__kept_weights__mismatch_high=1.5
    )
    inputs = self.inputs([0.8, 0.8, 0.3], [0.1, 0.4, 0.3], [0.1, 0.1, 0.6])
    # mismatch 1, 4, 1/2 and staleness 8, 2, 1
    np.testing.assert_allclose(
      made.correction(inputs).weights,
      [[1.0 * 4.0, 1.5 * 2.0, 0.5 * 1.0]],
      rtol=1e-6,
    )

  def test_what_one_rejects_is_rejected(self):
    made = self.make(off_policy__correction="mask", off_policy__high=3.0)
    inputs = self.inputs([0.8, 0.8, 0.6], [0.2, 0.4, 0.3], [0.2, 0.1, 0.3])
    got = made.correction(inputs)
    np.testing.assert_array_equal(got.keep, [[False, False, True]])
    np.testing.assert_allclose(got.weights, [[0, 0, 2]], rtol=1e-6)

  @pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
  def test_without_bounds_they_are_the_one_of_old(self, level):
    wide = {"off_policy__high": 1e8, "off_policy__level": level}
    two = self.make(**wide, method__kept_weights__mismatch_high=1e8)
    one = make_algorithm(off_policy__correction="truncate", **wide)
    behavior = make_rollout().behavior_logprobs
    inputs = {
      "proximal_logprobs": behavior + noise(1),
      "writer_logprobs": behavior + 0.1 * noise(2),
      "behavior_logprobs": behavior,
      "policy_mask": make_rollout().mask,
    }
    np.testing.assert_allclose(
      two.correction(inputs).weights, one.correction(inputs).weights, rtol=1e-4
    )
    assert two.leaves - one.leaves == {"writer_logprobs"}

  @pytest.mark.slow
  def test_weights_that_stay_leave_staleness_at_one(self, model):
    """Exactly, despite the engine's noise, also for complete responses."""
    still = make_run(
      model,
      **KEEP | MIXED,
      optimizer__policy__learning_rate=0.0,
      model__sampler_dtype="bfloat16",
      off_policy__level="sequence",
    )
    steps, _ = record(still, 4)
    assert max(step.row["staleness/max"] for step in steps) > 0
    staleness = still.learner.algorithm.corrections["staleness"]
    for step in steps:
      experience, _, rollout = seen(step)
      mask = experience["policy_mask"]
      given = {**experience, "behavior_logprobs": rollout.behavior_logprobs}
      assert (np.asarray(staleness(given).weights)[mask] == 1.0).all()
      assert step.row["correction/staleness_weight_mean"] == 1.0
      assert abs(step.row["correction/mismatch_weight_mean"] - 1.0) > 1e-6

  def test_each_is_reported(self, history):
    for step in history:
      row = step.row
      assert abs(row["correction/mismatch_weight_mean"] - 1.0) < 1e-3
      assert row["correction/kept"] == row["correction/mismatch_kept"] == 1.0
    stale = [step.row["correction/staleness_weight_mean"] for step in history]
    assert max(abs(x - 1.0) for x in stale) > 1e-2
    np.testing.assert_allclose(
      stale, [step.row["correction/weight_mean"] for step in history], atol=1e-3
    )


class TestState:
  @pytest.mark.parametrize(("fsdp", "dtype"), [(1, "bfloat16"), (2, "float32")])
  def test_the_last_versions_are_kept_in_every_bit(self, model, fsdp, dtype):
    run = make_run(model, **KEEP | LATE, mesh__data=1, mesh__fsdp=fsdp)
    made = kept_weights.make(
      run.learner.policy, run.learner.mesh, dtype=dtype, versions=3
    )
    params = run.learner.initial_params()
    of = lambda version: jax.tree.map(lambda x: x + 0.1 * version, params)
    rounded = lambda tree: jax.tree.map(
      lambda x: x.astype(dtype).astype(jnp.float32), tree
    )
    kept = made.init(params)
    assert {x.dtype for x in jax.tree.leaves(kept)} == {jnp.dtype(dtype)}
    chex.assert_trees_all_equal(made.read(kept, 2), rounded(params))
    for version in range(5):
      kept = made.record(kept, of(version), version)
    for version in (2, 3, 4):
      found = made.read(kept, version)
      chex.assert_trees_all_equal(found, rounded(of(version)))
    places = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
    assert places(made.read(kept, 4)) == places(params)
    assert places(kept) == places(made.shapes)
    split = sharding.with_leading_axis(params["embed"]["embedding"].sharding)
    assert kept["embed"]["embedding"].sharding == split
    assert kept["embed"]["embedding"].shape[0] == 3

  def test_how_many_is_fixed(self, model, tmp_path):
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "1" / "COMMIT").touch()
    config = tiny_run.make_config(model, **KEEP | MIXED)
    Workdir(tmp_path).begin(config)
    config.schedule.max_staleness += 1
    with pytest.raises(
      InputError, match="on resume: config.schedule.max_staleness"
    ):
      Workdir(tmp_path).changes(config)

  def test_an_average_has_one_size(self, model, tmp_path):
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "1" / "COMMIT").touch()
    config = tiny_run.make_config(model, **MIXED, method__use=("ppo_ewma",))
    Workdir(tmp_path).begin(config)
    config.schedule.max_staleness += 1
    assert set(Workdir(tmp_path).changes(config)) == {"schedule.max_staleness"}
