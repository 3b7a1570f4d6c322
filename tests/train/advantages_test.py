"""Advantages and masks by name, against slow versions and by hand."""

import jax
import numpy as np
import pytest
import reference
import tiny_run

from jaxrl_llm.train import advantages
from jaxrl_llm.types import Status

ROWS, ROOM = 8, 7


def make_episodes(seed=0, **changes):
  """Four groups of two; rewards lie on the last tokens."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, ROOM + 1, ROWS)
  column = np.arange(ROOM)[None]
  draw = lambda: rng.normal(size=(ROWS, ROOM)).astype(np.float32)
  rewards = np.where(rng.random(ROWS) < 0.5, 1.0, -1.0).astype(np.float32)
  fields = {
    "token_rewards": np.where(
      column == lengths[:, None] - 1, rewards[:, None], 0
    ),
    "values": draw(),
    "next_values": draw()[:, 0],
    "mask": column < lengths[:, None],
    "lengths": lengths,
    "status": np.full(ROWS, int(Status.FINISHED)),
    "truncated": np.zeros(ROWS, bool),
    "groups": np.arange(ROWS) // 2,
    "old_logprobs": draw(),
    "behavior_logprobs": draw(),
  }
  return advantages.Episodes(**fields | changes)


def compute(episodes, **changes):
  settings = tiny_run.make_config(
    "none", **{f"estimator__{k}": v for k, v in changes.items()}
  ).estimator
  made = advantages.ADVANTAGES[settings.name](settings)
  return np.asarray(jax.jit(made)(episodes))


def outcomes(episodes):
  return np.asarray(episodes.token_rewards).sum(axis=1)


def spread(values, episodes):
  """One number per response, at each of its tokens."""
  return np.where(episodes.mask, np.asarray(values)[:, None], 0.0)


class TestGae:
  @pytest.mark.parametrize("boundary", ["repeat", "bootstrap"])
  def test_each_row_has_its_lambda_and_its_end(self, boundary):
    cut = np.arange(ROWS) % 3 == 0
    episodes = make_episodes(truncated=cut)
    episodes = episodes.replace(
      token_rewards=np.where(cut[:, None], 0, episodes.token_rewards)
    )
    got = compute(episodes, name="gae", alpha=0.8, boundary=boundary)
    last = episodes.values[np.arange(ROWS), episodes.lengths - 1]
    behind = {"repeat": last, "bootstrap": episodes.next_values}[boundary]
    lambdas = [
      reference.length_adaptive_lambda(n, 0.8) for n in episodes.lengths
    ]
    expected = reference.gae(
      episodes.token_rewards,
      episodes.values,
      episodes.mask,
      1.0,
      np.asarray(lambdas)[:, None],
      np.where(cut, behind, 0.0),
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    if boundary == "repeat":
      assert not got[cut, episodes.lengths[cut] - 1].any()


class TestGroups:
  @pytest.mark.parametrize("center", ["mean", "median", "leave_one_out"])
  @pytest.mark.parametrize("scale", ["std", "none"])
  def test_relative_to_the_others(self, center, scale):
    # Of three and five, so that the median is one of them.
    episodes = make_episodes(groups=np.asarray([0, 1, 0, 1, 1, 0, 1, 1]))
    got = compute(
      episodes, name="group", center=center, scale=scale, epsilon=0.1
    )
    expected = reference.group_relative(
      outcomes(episodes), episodes.groups, center, scale, 0.1
    )
    np.testing.assert_allclose(
      got, spread(expected, episodes), rtol=1e-5, atol=1e-6
    )

  def test_of_tokens(self):
    episodes = make_episodes()
    got = compute(episodes, name="token_group", epsilon=0.1)
    expected = reference.token_group_relative(
      outcomes(episodes), episodes.lengths, episodes.groups, 0.1, np.inf
    )
    np.testing.assert_allclose(
      got, spread(expected, episodes), rtol=1e-5, atol=1e-6
    )

  def test_optimal_baseline(self):
    episodes = make_episodes()
    got = compute(episodes, name="optimal_baseline")
    difference = np.float64(episodes.old_logprobs) - episodes.behavior_logprobs
    weights = np.exp(np.where(episodes.mask, difference, 0.0).sum(axis=1))
    baseline = reference.optimal_baseline(
      outcomes(episodes), weights, episodes.lengths, episodes.groups
    )
    np.testing.assert_allclose(
      got,
      spread(outcomes(episodes) - baseline, episodes),
      rtol=1e-4,
      atol=1e-5,
    )


class TestRewardToGo:
  def make(self):
    episodes = make_episodes()
    rewards = np.random.default_rng(1).normal(size=(ROWS, ROOM))
    rewards = np.where(episodes.mask, rewards, 0.0).astype(np.float32)
    return episodes.replace(token_rewards=rewards)

  @pytest.mark.parametrize("gamma", [1.0, 0.5])
  def test_by_definition(self, gamma):
    episodes = self.make()
    got = compute(episodes, name="reward_to_go", center="none", gamma=gamma)
    expected = np.zeros((ROWS, ROOM))
    for t in range(ROOM):
      powers = gamma ** np.arange(ROOM - t)
      expected[:, t] = (episodes.token_rewards[:, t:] * powers).sum(axis=1)
    np.testing.assert_allclose(
      got, np.where(episodes.mask, expected, 0), rtol=1e-5, atol=1e-5
    )

  def test_less_the_mean_of_the_group(self):
    episodes = self.make()
    plain = compute(episodes, name="reward_to_go", center="none")
    got = compute(episodes, name="reward_to_go", center="mean")
    pairs = outcomes(episodes).reshape(-1, 2)
    baseline = np.repeat(pairs.mean(axis=1), 2)
    np.testing.assert_allclose(
      got, plain - spread(baseline, episodes), rtol=1e-5, atol=1e-5
    )


class TestSequenceWeights:
  def test_by_hand(self):
    old = np.log(np.asarray([[2.0, 3.0, 7.0], [1.0, 0.5, 1.0]], np.float32))
    mask = np.asarray([[1, 1, 0], [1, 1, 1]], bool)
    weights = advantages.sequence_weights(old, np.zeros_like(old), mask)
    np.testing.assert_allclose(weights, [6.0, 0.5], rtol=1e-6)

  def test_stay_finite(self):
    old = np.asarray([[100.0], [-100.0]], np.float32)
    weights = advantages.sequence_weights(
      old, np.zeros_like(old), np.ones((2, 1), bool)
    )
    np.testing.assert_allclose(weights, np.exp([20.0, -20.0]), rtol=1e-6)


class TestMasks:
  def test_in_window(self):
    mask = np.asarray([[1, 1, 1, 0], [1, 0, 1, 1]], bool)
    got = advantages.in_window(mask, np.asarray([0, 2]))
    np.testing.assert_array_equal(got, [[1, 1, 1, 0], [0, 0, 1, 1]])

  def test_without_overlong(self):
    status = np.full(ROWS, int(Status.FINISHED))
    status[2], status[5] = int(Status.OVERLONG), int(Status.TRUNCATED)
    episodes = make_episodes(status=status)
    got = np.asarray(advantages.without_overlong(episodes.mask, episodes))
    assert not got[2].any()
    others = np.arange(ROWS) != 2
    np.testing.assert_array_equal(got[others], episodes.mask[others])

  def test_without_pivot(self):
    groups = np.asarray([0, 0, 0, 1, 1, 1, 2, 2])
    rewards = np.asarray([3.0, 1.0, 2.0, 5.0, 5.0, 9.0, 0.0, 1.0])
    column = np.zeros((ROWS, ROOM), np.float32)
    column[:, 0] = rewards
    episodes = make_episodes(groups=groups, token_rewards=column)
    got = np.asarray(advantages.without_pivot(episodes.mask, episodes))
    left_out = [2, 3, 6]
    assert not got[left_out].any()
    others = np.setdiff1d(np.arange(ROWS), left_out)
    np.testing.assert_array_equal(got[others], episodes.mask[others])

  def test_without_tail(self):
    cut = np.arange(ROWS) < 2
    lengths = np.asarray([5, 1, 4, 4, 4, 4, 4, 4])
    mask = np.arange(ROOM)[None] < lengths[:, None]
    episodes = make_episodes(truncated=cut, lengths=lengths, mask=mask)
    got = np.asarray(advantages.without_tail(mask, episodes, tokens=2))
    np.testing.assert_array_equal(got[0], np.arange(ROOM) < 3)
    assert not got[1].any()
    np.testing.assert_array_equal(got[2:], mask[2:])
