"""Advantages, rewards and masks match slow versions and results by hand."""

import numpy as np
import pytest
import reference
from helpers.tiny_algorithm import (
  compute,
  make_algorithm,
  make_experience,
  make_inputs,
  make_rollout,
)

from jaxrl_llm.learner import estimates, parts
from jaxrl_llm.methods import a_3po, vcpo


def estimate(inputs, **changes):
  """Computes the advantages of an estimator."""
  return after((), inputs, **changes)


def after(use, inputs, **changes):
  """Computes the advantages of methods, with settings of the estimator."""
  changes = {f"estimator__{k}": v for k, v in changes.items()}
  made = make_algorithm(method__use=use, **changes)
  return compute(made, "advantages", inputs)


def outcomes(inputs):
  return np.asarray(inputs["token_rewards"]).sum(axis=1)


def spread(values, inputs):
  """Broadcasts one number per response to its tokens."""
  return np.where(inputs["mask"], np.asarray(values)[:, None], 0.0)


class TestGae:
  @pytest.mark.parametrize("boundary", ["repeat", "bootstrap"])
  def test_each_row_has_its_lambda_and_its_end(self, boundary):
    cut = np.arange(8) % 3 == 0
    inputs = make_inputs(truncated=cut)
    inputs["token_rewards"] = np.where(cut[:, None], 0, inputs["token_rewards"])
    got = estimate(inputs, name="gae", alpha=0.8, boundary=boundary)
    last = inputs["values"][np.arange(8), inputs["lengths"] - 1]
    behind = {"repeat": last, "bootstrap": inputs["next_values"]}[boundary]
    lambdas = [
      reference.length_adaptive_lambda(n, 0.8) for n in inputs["lengths"]
    ]
    expected = reference.gae(
      inputs["token_rewards"],
      inputs["values"],
      inputs["mask"],
      1.0,
      np.asarray(lambdas)[:, None],
      np.where(cut, behind, 0.0),
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    if boundary == "repeat":
      assert not got[cut, inputs["lengths"][cut] - 1].any()


class TestGroups:
  @pytest.mark.parametrize(
    ("center", "scale"), [("median", "std"), ("leave_one_out", "none")]
  )
  def test_relative_to_the_others(self, center, scale):
    # Odd group sizes (3 and 5), so that the median is one of the rewards.
    inputs = make_inputs(groups=np.asarray([0, 1, 0, 1, 1, 0, 1, 1]))
    got = estimate(
      inputs, name="group", center=center, scale=scale, epsilon=0.1
    )
    expected = reference.group_relative(
      outcomes(inputs), inputs["groups"], center, scale, 0.1
    )
    np.testing.assert_allclose(
      got, spread(expected, inputs), rtol=1e-5, atol=1e-6
    )

  @pytest.mark.parametrize("norms", ["length", "exact"])
  def test_optimal_baseline(self, norms):
    inputs = make_inputs()
    vcpo_ = {"method__use": ("vcpo",), "method__vcpo__gradient_norms": norms}
    got = compute(make_algorithm(**vcpo_), "advantages", inputs)
    squared = {
      "length": inputs["lengths"],
      "exact": np.square(inputs["gradient_norms"]),
    }[norms]
    difference = (
      np.float64(inputs["old_logprobs"]) - inputs["behavior_logprobs"]
    )
    weights = np.exp(np.where(inputs["mask"], difference, 0.0).sum(axis=1))
    baseline = reference.optimal_baseline(
      outcomes(inputs), weights, squared, inputs["groups"]
    )
    np.testing.assert_allclose(
      got, spread(outcomes(inputs) - baseline, inputs), rtol=1e-4, atol=1e-5
    )


class TestLengthsOfOwnTokens:
  """Tokens that the policy only read, such as a tool's, do not count."""

  def test_hapos_advantages_sum_to_zero_over_what_is_trained(self):
    made = make_experience(make_algorithm(method__use=("hapo",)))
    advantages, mask = made["advantages"], made["policy_mask"]
    holes = mask.sum(axis=1) < make_rollout().lengths
    assert holes.any() and 0 < np.abs(advantages).max() < 5
    for group in np.unique(make_rollout().group):
      rows = make_rollout().group == group
      assert abs(advantages[rows][mask[rows]].sum()) < 1e-5

  @pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
      ("policy_lambda", {"estimator__alpha": 2.0}, [0.75, 0.75]),
      (vcpo.SQUARED_NORMS["length"], {}, [2, 2]),
      (
        "shaped_rewards",
        {"reward__overlong_buffer": 4, "sampler__max_response_length": 4},
        [-0.5, -0.5],
      ),
    ],
  )
  def test_a_tools_tokens_do_not_count(self, name, settings, expected):
    made = make_algorithm(**settings)
    given = {
      "mask": np.asarray([[1, 0, 0, 1], [1, 1, 0, 0]], bool),
      "lengths": np.asarray([4, 2]),
      "rewards": np.zeros(2, np.float32),
    }
    got = parts.evaluate([name], made.parts, given)[name]
    np.testing.assert_array_equal(got, expected)


class TestRewardToGo:
  def make(self):
    inputs = make_inputs()
    rewards = np.random.default_rng(1).normal(size=inputs["mask"].shape)
    rewards = np.where(inputs["mask"], rewards, 0.0).astype(np.float32)
    return inputs | {"token_rewards": rewards}

  @pytest.mark.parametrize("gamma", [1.0, 0.5])
  def test_by_definition(self, gamma):
    inputs = self.make()
    got = after(("reinforce_pp",), inputs, center="none", gamma=gamma)
    expected = reference.lambda_returns(
      inputs["token_rewards"], 0 * got, inputs["mask"], gamma, 1.0
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)

  def test_less_the_mean_of_the_group(self):
    inputs = self.make()
    plain = after(("reinforce_pp",), inputs, center="none")
    got = after(("reinforce_pp",), inputs, center="mean")
    pairs = outcomes(inputs).reshape(-1, 2)
    baseline = np.repeat(pairs.mean(axis=1), 2)
    np.testing.assert_allclose(
      got, plain - spread(baseline, inputs), rtol=1e-5, atol=1e-5
    )


def test_sequence_weights_stay_finite():
  old = np.asarray([[100.0], [-100.0]], np.float32)
  weights = vcpo.sequence_weights(
    old, np.zeros_like(old), np.ones((2, 1), bool)
  )
  np.testing.assert_allclose(weights, np.exp([20.0, -20.0]), rtol=1e-6)


def test_the_outcome_is_on_the_last_unmasked_token():
  mask = np.asarray([[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], bool)
  got = estimates.outcome_on_token(
    np.asarray([1.0, 2.0, 3.0]), mask, np.asarray([4, 3, 0])
  )
  # An entirely masked response has it on its last token, for its group; an
  # empty one has none.
  np.testing.assert_array_equal(got, [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 0, 0]])


def test_what_turns_had_is_not_given_again():
  got = estimates.turn_rewards_on_tokens(
    shaped_rewards=np.float32([3.0, 3.0]),
    turn_rewards=np.float32([[0, 1, 0, 0, 2], [0, 1, 0, 0, 0]]),
    judged=np.ones(2, bool),
    truncated=np.zeros(2, bool),
    mask=np.asarray([[1, 1, 0, 0, 1]] * 2, bool),
    lengths=np.asarray([5, 5]),
  )
  np.testing.assert_array_equal(got, [[0, 1, 0, 0, 2]] * 2)


@pytest.mark.parametrize(
  ("version", "expected"),
  [
    # Ages 2, 1, 0: the policy being trained is one version newer than 9.
    ([[7, 8, 9], [9, 9, 99]], [[2 / 3, 1 / 2, 0], [0, 0, 0]]),
    # Version 9 wrote none of these tokens.
    ([[7, 8]], [[2 / 3, 1 / 2]]),
  ],
)
def test_interpolation_share_by_hand(version, expected):
  version = np.asarray(version)
  got = a_3po.interpolation_share(version, version < 99, 9)
  np.testing.assert_allclose(got, expected, rtol=1e-6)
