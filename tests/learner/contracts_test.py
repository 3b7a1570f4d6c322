"""Contracts between sampler, estimates and losses that were broken once."""

import zlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import recipes, tiny_run
from helpers.tiny_algorithm import make_algorithm
from helpers.tiny_run import make_run

from jaxrl_llm import metrics, rewards
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import core, providers
from jaxrl_llm.trainer import loop
from jaxrl_llm.trainer.validation import validate
from jaxrl_llm.types import join_rows, take_rows

WIDE = {
  "loss__clip_low": 0.999999,
  "loss__clip_high": 1e9,
  "loss__nll_coefficient": 0.0,
  "off_policy__high": 1e9,
}
# Proximal policy -> the settings that choose it.
PROXIMALS = {
  "recompute": {},
  "stored": {"off_policy__proximal": "stored"},
  "interpolate": {"method__use": ("a_3po",)},
  "ewma": {"method__use": ("ppo_ewma",)},
}


class TestImportanceWeights:
  """Spec 9.7: without bounds, the gradient is the importance-weighted one."""

  @pytest.mark.parametrize("loss", ["clip", "cispo"])
  @pytest.mark.parametrize("correction", ["auto", "none", "truncate", "mask"])
  @pytest.mark.parametrize("proximal", PROXIMALS)
  def test_every_accepted_pair(self, proximal, correction, loss):
    changes = WIDE | PROXIMALS[proximal]
    changes["off_policy__correction"] = correction
    if loss == "cispo":
      changes["method__use"] = (*changes.get("method__use", ()), loss)
    try:
      validate(tiny_run.make_config("none", **changes))
    except InputError as error:
      assert "off_policy" in str(error) or "'a_3po' is defined" in str(error)
      return
    made = make_algorithm(**changes)
    rng = np.random.default_rng(0)
    logprobs, old, behavior, average, advantages = rng.normal(
      scale=0.3, size=(5, 1, 12)
    ).astype(np.float32)
    if proximal == "recompute" and made.correction is None:
      behavior = old  # Without correction, π_old must sample.
    mask = np.ones((1, 12), bool)
    inputs = {
      "old_logprobs": old,
      "average_logprobs": average,
      "behavior_logprobs": behavior,
      "advantages": advantages,
      "interpolation_share": np.full((1, 12), 0.25, np.float32),
      "policy_mask": mask,
      "mask": mask,
      "segments": mask.astype(int),
    }
    inputs["proximal_logprobs"] = inputs[made.proximal]
    weights = np.ones((1, 12), np.float32)
    if made.correction is not None:
      weights = made.correction(inputs).weights

    def total(logprobs):
      out = made.policy_loss(inputs | {"logprobs": logprobs})
      return jnp.sum(weights * out.loss)

    gradient = jax.jit(jax.grad(total))(logprobs)
    expected = -np.exp(logprobs - behavior) * advantages
    np.testing.assert_allclose(gradient, expected, rtol=2e-5)

  @pytest.mark.parametrize(
    ("proximal", "stale", "fresh"),
    [
      ("recompute", 2.0, 1.0),
      ("interpolate", 2.0, np.exp(9.0)),
      # The ratio to the sampler is already a correction.
      ("stored", np.exp(9.0), np.exp(9.0)),
      # An average is never uncorrected.
      ("ewma", 100.0, 100.0),
    ],
  )
  def test_stale_tokens_are_corrected_by_default(self, proximal, stale, fresh):
    """The weights are of a token whose probability has risen by exp(9)."""
    now, mask = np.zeros((1, 1), np.float32), np.ones((1, 1), bool)
    inputs = dict.fromkeys(
      ("logprobs", "old_logprobs", "average_logprobs", "interpolation_share"),
      now,
    )
    inputs |= {"behavior_logprobs": now - 9, "advantages": now - 1}
    inputs |= {"policy_mask": mask, "interpolation_share": now + 1}

    def weight(**changes):
      made = make_algorithm(**changes, **PROXIMALS[proximal])
      given = inputs | {"proximal_logprobs": inputs[made.proximal]}
      corrected = made.correction(given).weights if made.correction else 1.0
      return float((corrected * made.policy_loss(given).loss)[0, 0])

    for late in (
      {"schedule__stop": "first_groups"},
      {"schedule__lag": 1},
      {"schedule__replay": 0.5},
    ):
      assert weight(**late) == pytest.approx(stale)
    assert weight() == pytest.approx(fresh)

  def test_a_correction_of_its_own_has_the_bound_that_is_set(self):
    config = tiny_run.make_config("none", schedule__lag=1, off_policy__high=3.0)
    assert core.correction_of(config) == ("truncate", 3.0)

  @pytest.mark.parametrize(
    ("changes", "weights"),
    [
      ({"off_policy__low": 0.5}, [0.5, 2.0]),
      ({"off_policy__correction": "none"}, np.exp([-1.0, 1.0])),
    ],
  )
  def test_interpolation_obeys_both_bounds(self, changes, weights):
    given = {
      "method__use": ("a_3po",),
      "off_policy__correction": "truncate",
    }
    made = make_algorithm(**given | changes)
    # w = exp(-1) and exp(1); the ratio is 1.
    inputs = {
      "logprobs": np.array([[-1.0, 0.0]], np.float32),
      "behavior_logprobs": np.array([[0.0, -1.0]], np.float32),
      "advantages": np.full((1, 2), 0.37, np.float32),
      "interpolation_share": np.ones((1, 2), np.float32),
    }
    loss = made.policy_loss(inputs).loss
    np.testing.assert_allclose(loss[0], -0.37 * np.array(weights), rtol=1e-6)


class TestNothingToTrain:
  """A batch without trainable tokens changes no weight, moment or count."""

  @pytest.mark.parametrize("streaming", [False, True])
  def test_leaves_the_models_as_they_were(self, model, streaming):
    run = make_run(
      model,
      optimizer__policy__weight_decay=0.1,
      loss__nll_coefficient=0.0,
      off_policy__correction="mask",
      **{f"optimizer__{x}__mini_batch": 32 for x in ("policy", "value")},
    )
    states, responses = recipes.collect(run)
    unknown = responses.replace(judged=np.zeros(len(responses.rewards), bool))
    # The correction rejects all.
    rollout = responses.rollout
    far = rollout.replace(behavior_logprobs=rollout.behavior_logprobs - 9.0)
    rejected = responses.replace(rollout=far)
    group = rollout.group
    in_groups = lambda batch: [
      join_rows([take_rows(batch, group == i)]) for i in np.unique(group)
    ]
    update = lambda state, batch: recipes.update(
      run, state, in_groups(batch) if streaming else batch
    )
    # Moments that would change the weights.
    learner, row = update(states.learner, responses)
    assert row["policy/entropy"] > 0 and row["value/loss"] > 0
    before = jax.device_get((learner.policy, learner.critic))
    learner, row = update(learner, unknown)
    chex.assert_trees_all_equal((learner.policy, learner.critic), before)
    assert learner.step == 2 and row == {}
    # The critic trains on rejected tokens.
    learner, row = update(learner, rejected)
    chex.assert_trees_all_equal(learner.policy, before[0])
    assert learner.step == 3 and "policy/loss" not in row


class TestAverage:
  def test_a_refused_update_moves_nothing(self, model):
    run = make_run(model, method__use=("ppo_ewma",))
    states, _ = loop.begin(run)
    move = run.learner.companions["ema"].follow
    average = states.learner.companions["ema"]
    before = jax.device_get(average)
    moved = jax.tree.map(lambda x: x + 1.0, states.learner.policy.trained)
    kept = move(average, moved, jnp.float32(1.0))
    chex.assert_trees_all_equal(kept, before)
    after = move(kept, moved, jnp.float32(0.0))
    assert after["weight"] > before["weight"]

  def test_the_weight_that_is_logged_is_that_of_the_loss(self, model):
    run = make_run(
      model,
      method__use=("ppo_ewma",),
      optimizer__policy__mini_batch=32,
      optimizer__policy__learning_rate=0.05,
    )
    states, responses = recipes.collect(run)
    learner, rollout = run.learner, responses.rollout
    state, _ = recipes.update(run, states.learner, responses)
    rows = np.arange(len(rollout.lengths))
    packed = {"policy": learner._packer.mini_batches("policy", rollout, rows)}
    average = providers.Scoring(learner, state, rollout, packed).tokens(
      "policy", lambda x: x.logprobs, state.companions["ema"]["params"]
    )
    _, row = recipes.update(run, state, responses)
    weights = np.exp(average - rollout.behavior_logprobs)[rollout.mask]
    expected = np.minimum(weights, 100).mean()
    np.testing.assert_allclose(
      row["correction/weight_mean"], expected, rtol=1e-5
    )


class TestMismatch:
  @pytest.mark.parametrize(
    ("changes", "share"),
    [
      ({}, 0.5),  # The first mini-batch, to compare sampler and trainer.
      ({"method__use": ("hapo",)}, 1.0),
      ({"method__use": ("hapo",), "method__hapo__tau": 0.0}, 1.0),
      ({"method__use": ("xrpo",)}, 1.0),
      ({"method__use": ("f_tis",)}, 1.0),
    ],
  )
  def test_all_rows_are_scored_if_a_part_reads_scores(
    self, model, changes, share
  ):
    changes = {"estimator__name": "group"} | changes
    run = make_run(model, off_policy__proximal="stored", **changes)
    states, responses = recipes.collect(run)
    seen = []
    _, row = recipes.update(run, states.learner, responses, seen.append)
    (batch,) = seen
    assert batch.scores["scored"].mean() == share
    assert row["policy/skipped"] == 0 and row["policy/grad_norm"] > 0

  def test_is_seen_even_if_the_ratio_is_against_the_sampler(self, model):
    run = make_run(model, off_policy__proximal="stored")
    states, responses = recipes.collect(run)
    rollout = responses.rollout
    # The sampler reports log-probs of another distribution.
    wrong = rollout.behavior_logprobs + 0.5 * rollout.mask
    wrong = responses.replace(rollout=rollout.replace(behavior_logprobs=wrong))
    _, row = recipes.update(run, states.learner, wrong)
    got = row["sampler_trainer/logprob_diff_mean"]
    np.testing.assert_allclose(got, 0.5, atol=1e-4)


def test_value_pretraining_regresses_on_monte_carlo_returns(model):
  run = make_run(model, value__pretrain_steps=1, estimator__lambda_value=0.5)
  states, responses = recipes.collect(run)
  batch = run.pretraining.learner.measure(
    states.learner, "critic", responses, np.random.default_rng(0)
  )
  mask = batch.experience["value_mask"]
  outcome = np.broadcast_to(responses.rewards[:, None], mask.shape)
  assert mask.any() and np.ptp(responses.rewards) > 0
  np.testing.assert_allclose(
    batch.experience["returns"][mask], outcome[mask], atol=1e-6
  )


def test_accuracy_in_value_pretraining_is_over_judged_responses(
  model, tmp_path, monkeypatch
):
  def fails_for_some(prompt):
    if zlib.crc32(prompt.encode()) % 2:
      raise ValueError("no verdict")
    return True

  monkeypatch.setitem(rewards.REWARDS, "fails_for_some", fails_for_some)
  run = make_run(
    model, value__pretrain_steps=1, reward__name="fails_for_some", run__steps=0
  )
  assert loop.train(run, tmp_path) == 0
  rows = metrics.read_rows(tmp_path / "value_pretrain.jsonl")
  assert [row["reward/accuracy"] for row in rows] == [1.0, 1.0]
