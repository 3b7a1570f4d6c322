"""Advantages, targets and masks of a batch, by hand."""

import functools

import chex
import jax
import numpy as np
import pytest
import tiny_run

from jaxrl_llm.train import experience, packing, recipe


def make_recipe(**changes):
  config = tiny_run.make_config("none", **changes)
  return recipe.make_recipe(estimator=config.estimator, loss=config.loss)


@functools.cache
def make_estimate(**changes):
  made = make_recipe(**changes)
  return jax.jit(functools.partial(experience.make_experience, recipe=made))


LENGTHS = np.asarray([4, 2, 3])
MASK = np.arange(5)[None] < LENGTHS[:, None]
# float32 numbers that add up exactly.
VALUES = np.asarray(
  [
    [0.5, 0.25, -0.5, 1.0, 9.0],
    [0.25, 0.5, 9.0, 9.0, 9.0],
    [-0.25, 0.0, 0.75, 9.0, 9.0],
  ],
  np.float32,
)


def make(
  values=VALUES,
  rewards=(1.0, -1.0, 1.0),
  correct=(True, False, True),
  judged=(True, True, True),
  **changes,
):
  return make_estimate(**changes)(
    np.asarray(rewards, np.float32),
    np.asarray(correct),
    np.asarray(judged),
    LENGTHS,
    MASK,
    np.where(MASK, -1.0, 0.0).astype(np.float32),
    values,
  )


class TestTokenRewards:
  def test_on_the_last_token(self):
    got = experience.token_rewards(np.asarray([1.0, -1.0, 2.0]), LENGTHS, 5)
    np.testing.assert_array_equal(
      got, [[0, 0, 0, 1, 0], [0, -1, 0, 0, 0], [0, 0, 2, 0, 0]]
    )

  def test_an_empty_response_gets_none(self):
    got = experience.token_rewards(np.asarray([1.0]), np.asarray([0]), 3)
    assert not np.asarray(got).any()


class TestDecoupledGae:
  def test_golden(self):
    got = make(estimator__alpha=1.0)
    # α = 1: λ = 1 − 1/length = 3/4, 1/2, 2/3; γ = 1.
    # Row 0, backwards: δ = 0, 1.5, -0.75, -0.25.
    a3 = 1.0 - 1.0
    a2 = 1.5 + 0.75 * a3
    a1 = -0.75 + 0.75 * a2
    a0 = -0.25 + 0.75 * a1
    # Row 1: δ = -1.5, 0.25. Row 2: δ = 0.25, 0.75, 0.25.
    b1 = -1.5
    b0 = 0.25 + 0.5 * b1
    c2 = 0.25
    c1 = 0.75 + 2 / 3 * c2
    c0 = 0.25 + 2 / 3 * c1
    np.testing.assert_allclose(
      got.advantages,
      [[a0, a1, a2, a3, 0], [b0, b1, 0, 0, 0], [c0, c1, c2, 0, 0]],
      rtol=1e-6,
      atol=1e-6,
    )

  def test_targets_are_the_reward_whatever_the_critic_says(self):
    expected = np.where(MASK, np.asarray([[1.0], [-1.0], [1.0]]), 0.0)
    for values in (VALUES, -3.0 * VALUES + 0.1, np.zeros_like(VALUES)):
      np.testing.assert_array_equal(make(values).returns, expected)

  def test_lambda_of_the_critic_does_not_touch_the_policy(self):
    chex.assert_trees_all_equal(
      make().advantages, make(estimator__lambda_value=0.5).advantages
    )
    with pytest.raises(AssertionError):
      chex.assert_trees_all_equal(
        make().returns, make(estimator__lambda_value=0.5).returns
      )

  def test_padding_does_not_matter(self):
    spoiled = np.where(MASK, VALUES, np.nan).astype(np.float32)
    got, expected = make(spoiled), make()
    chex.assert_trees_all_equal(got.advantages, expected.advantages)
    chex.assert_trees_all_equal(got.returns, expected.returns)

  def test_no_gradient_flows_into_what_was_estimated(self):
    total = lambda v: make(v).advantages.sum() + make(v).returns.sum()
    assert not np.asarray(jax.grad(total)(VALUES)).any()


class TestMasks:
  def test_correct_responses_are_the_positive_ones(self):
    got = make()
    np.testing.assert_array_equal(got.policy_mask, MASK)
    np.testing.assert_array_equal(got.value_mask, MASK)
    np.testing.assert_array_equal(
      got.positive_mask, MASK & np.asarray([[True], [False], [True]])
    )

  def test_what_the_verifier_could_not_judge_is_left_out(self):
    got = make(judged=(True, True, False), rewards=(1.0, -1.0, np.nan))
    for mask in (got.policy_mask, got.value_mask, got.positive_mask):
      assert not np.asarray(mask)[2].any()
    whole = make()
    for name in ("advantages", "returns", "policy_mask"):
      np.testing.assert_array_equal(got[name][:2], whole[name][:2])
    assert np.isfinite(got.advantages).all() and np.isfinite(got.returns).all()

  def test_shapes_are_checked(self):
    with pytest.raises(AssertionError):
      make(VALUES[:, :3])


class TestBatches:
  def make_packed(self, rows):
    rollout = tiny_run.random_rollout(np.random.default_rng(0), rows=3, room=5)
    rollout = rollout.replace(lengths=LENGTHS, mask=MASK)
    packed, layout = packing.pack(
      packing.select(rollout, rows), capacity=14, rows=2, micro_batches=2
    )
    return rows, packed, layout

  def test_unjudged_rows_carry_no_weight(self):
    got = jax.device_get(make(judged=(True, True, False)))
    made = make_recipe()
    rows, packed, layout = self.make_packed(np.asarray([2, 0, 1]))
    policy = experience.policy_batch(got, rows, packed, layout, recipe=made)
    value = experience.value_batch(got, rows, packed, layout)
    for batch in (policy, value):
      weights = layout.gather(batch.weights)
      assert not weights[0].any()
      np.testing.assert_allclose(weights[1:].sum(), 1.0, rtol=1e-6)
      np.testing.assert_array_equal(
        layout.gather(batch.packed.mask)[1:], MASK[:2]
      )
    nll = layout.gather(policy.nll_weights)
    np.testing.assert_allclose(nll[1], [0.025, 0.025, 0.025, 0.025, 0])
    assert not nll[[0, 2]].any()

  @pytest.mark.parametrize(
    ("mode", "expected"),
    [
      ("token-mean", (1 / 9, 1 / 9, 1 / 9)),
      ("seq-mean-token-mean", (1 / 12, 1 / 6, 1 / 9)),
      ("seq-mean-token-sum", (1 / 3, 1 / 3, 1 / 3)),
    ],
  )
  def test_reduction_is_the_one_of_the_config(self, mode, expected):
    got = jax.device_get(make())
    rows, packed, layout = self.make_packed(np.arange(3))
    batch = experience.policy_batch(
      got, rows, packed, layout, recipe=make_recipe(loss__mode=mode)
    )
    np.testing.assert_allclose(
      layout.gather(batch.weights),
      np.where(MASK, np.asarray(expected)[:, None], 0),
      rtol=1e-6,
    )


class TestMetrics:
  def test_by_hand(self):
    got = jax.device_get(make(judged=(True, True, False)))
    rollout = tiny_run.random_rollout(np.random.default_rng(0), rows=3, room=5)
    rollout = rollout.replace(
      group=np.asarray([0, 0, 1]),
      behavior_logprobs=np.where(MASK, -1.25, 7.0).astype(np.float32),
    )
    rewards = np.asarray([1.0, -1.0, 1.0])
    row = experience.experience_metrics(got, rollout, rewards)
    assert row["sampler_trainer/logprob_diff_mean"] == 0.25
    assert row["sampler_trainer/logprob_diff_max"] == 0.25
    assert row["rollout/zero_variance_groups"] == 0.5
    np.testing.assert_allclose(row["reward/mean"], 1 / 3)
    np.testing.assert_allclose(
      row["advantage/mean"], got.advantages[:2][MASK[:2]].mean(), rtol=1e-6
    )
    values, returns = VALUES[:2][MASK[:2]], got.returns[:2][MASK[:2]]
    np.testing.assert_allclose(
      row["value/explained_variance"],
      1 - (returns - values).var() / returns.var(),
      rtol=1e-5,
    )

  def test_nothing_judged(self):
    got = jax.device_get(make(judged=(False, False, False)))
    rollout = tiny_run.random_rollout(np.random.default_rng(0), rows=3, room=5)
    row = experience.experience_metrics(got, rollout, np.zeros(3))
    assert all(np.isfinite(v) for v in row.values())
