"""Advantages, targets and masks of a batch match results by hand."""

import jax
import numpy as np
import pytest
from helpers.tiny_experience import MASK, VALUES, make, make_rollout

from jaxrl_llm.types import Status


@pytest.mark.parametrize("scale", [1, -3, 0])
def test_targets_are_the_reward_whatever_the_critic_says(scale):
  expected = np.where(MASK, np.asarray([[1.0], [-1.0], [1.0]]), 0.0)
  np.testing.assert_array_equal(make(scale * VALUES)["returns"], expected)


class TestMasks:
  def test_correct_responses_are_the_positive_ones(self):
    got = make()
    np.testing.assert_array_equal(got["policy_mask"], MASK)
    np.testing.assert_array_equal(got["value_mask"], MASK)
    np.testing.assert_array_equal(
      got["positive_mask"], MASK & np.asarray([[True], [False], [True]])
    )

  def test_what_the_verifier_could_not_judge_is_left_out(self):
    got = make(judged=(True, True, False), rewards=(1.0, -1.0, np.nan))
    for mask in (got["policy_mask"], got["value_mask"], got["positive_mask"]):
      assert not np.asarray(mask)[2].any()
    whole = make()
    for name in ("advantages", "returns", "policy_mask"):
      np.testing.assert_array_equal(got[name][:2], whole[name][:2])
      assert np.isfinite(got[name]).all()

  def test_shapes_are_checked(self):
    with pytest.raises(ValueError, match="values has shape"):
      make(VALUES[:, :3])


class TestUnfinished:
  """Row 1 is truncated after two tokens, the first from an earlier window."""

  def make(self, **changes):
    rollout = make_rollout(
      status=np.asarray([0, int(Status.TRUNCATED), int(Status.OVERLONG)]),
      window_start=np.asarray([0, 1, 0]),
      group_id=np.asarray([0, 1, 2]),
    )
    # An unfinished response has no verdict: its entries must be ignored.
    verdicts = {"rewards": (1.0, 7.0, 1.0), "correct": (True, True, True)}
    return make(**verdicts, rollout=rollout, **changes)

  def test_has_no_reward_and_no_target(self):
    got = self.make()
    for name in ("value_mask", "returns", "positive_mask"):
      np.testing.assert_array_equal(got[name][1], [0] * 5)
    for row in (0, 2):
      np.testing.assert_array_equal(got["value_mask"][row], MASK[row])

  def test_trains_the_policy_on_its_window_alone(self):
    got = self.make(estimator__alpha=1.0)
    np.testing.assert_array_equal(got["policy_mask"][1], [0, 1, 0, 0, 0])
    # λ = 1/2, δ = 0.25 and 0, because the cut bootstraps with the last V.
    np.testing.assert_array_equal(got["advantages"][1], [0.25, 0, 0, 0, 0])

  def test_tokens_before_the_cut_can_be_left_out(self):
    got = jax.device_get(self.make(estimator__tail_drop=1))
    assert not got["policy_mask"][1].any()
    np.testing.assert_array_equal(got["policy_mask"][[0, 2]], MASK[[0, 2]])


class TestOptions:
  def test_overlong_filter(self):
    rollout = make_rollout(
      status=np.asarray([0, 0, int(Status.OVERLONG)], np.int32)
    )
    got = make(rollout=rollout, loss__overlong_filter=True)
    kept = MASK & np.asarray([[True], [True], [False]])
    np.testing.assert_array_equal(got["policy_mask"], kept)
    np.testing.assert_array_equal(got["value_mask"], MASK)
    whole = make(rollout=rollout)
    np.testing.assert_array_equal(whole["policy_mask"], MASK)
    # Without an end, a correct response is no example to imitate.
    for positive in (got["positive_mask"], whole["positive_mask"]):
      np.testing.assert_array_equal(positive, MASK * [[True], [False], [False]])

  def test_the_pivot_of_a_group_is_left_out(self):
    one = np.zeros(3, np.int32)
    settings = {
      "rollout": make_rollout(group=one, group_id=one),
      "rewards": (1.0, 9.0, -0.5),
      "estimator__name": "group",
      "estimator__center": "median",
      "data__group_size": 3,
    }
    got = jax.device_get(make(method__use=("mc_grpo",), **settings))
    kept = MASK & np.asarray([[False], [True], [True]])
    np.testing.assert_array_equal(got["policy_mask"], kept)
    whole = jax.device_get(make(**settings))
    np.testing.assert_array_equal(whole["policy_mask"], MASK)
    # Its reward still counts in the baseline of the others.
    np.testing.assert_array_equal(got["advantages"], whole["advantages"])
    assert not got["advantages"][0].any() and got["advantages"][1:, 0].all()

  def test_whitening_is_over_the_tokens_of_the_loss(self):
    got = make(judged=(True, True, False), estimator__normalize="whiten")
    inside = np.asarray(got["advantages"])[np.asarray(got["policy_mask"])]
    assert inside.size == 6
    np.testing.assert_allclose(inside.mean(), 0.0, atol=1e-6)
    np.testing.assert_allclose(inside.std(ddof=1), 1.0, rtol=1e-5)

  @pytest.mark.parametrize(
    "settings",
    [
      {"estimator__name": "group", "estimator__scale": "none"},
      {"estimator__name": "group", "estimator__center": "leave_one_out"},
      {"estimator__name": "group", "estimator__center": "median"},
      {"method__use": ("hapo",)},
      {"method__use": ("reinforce_pp",)},
      {"method__use": ("vcpo",)},
    ],
  )
  def test_what_was_not_judged_is_nobodys_baseline(self, settings):
    one = np.zeros(3, np.int32)
    rollout = make_rollout(group=one, group_id=one)
    judged = (True, False, True)
    got = jax.device_get(
      make(rollout=rollout, judged=judged, rewards=(1.0, 9.0, -0.5), **settings)
    )
    # The same as for the other two alone.
    apart = make_rollout(group=np.asarray([0, 1, 0]), group_id=one)
    expected = jax.device_get(
      make(rollout=apart, rewards=(1.0, 9.0, -0.5), **settings)
    )
    for row in (0, 2):
      assert got["advantages"][row].any()
      np.testing.assert_allclose(
        got["advantages"][row], expected["advantages"][row], rtol=1e-6
      )
    assert not got["policy_mask"][1].any()
