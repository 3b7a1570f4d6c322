"""Advantages of MaxRL, GDPO, EVPO, segments and turns: golden and slow."""

import jax
import numpy as np
import pytest
import reference
from helpers.tiny_algorithm import (
  make_algorithm,
  make_experience,
  make_rollout,
  noise,
)

from jaxrl_llm import estimators, masked
from jaxrl_llm.errors import InputError
from jaxrl_llm.methods import maxrl, sae, turn_gae
from jaxrl_llm.types import Status


def spread(values, mask):
  return np.where(mask, np.asarray(values)[:, None], 0.0)


class TestMaxRL:
  def advantages(self, rewards, groups):
    mask = np.ones((len(rewards), 2), bool)
    paid = np.stack([np.zeros_like(rewards), rewards], axis=1)
    return np.asarray(jax.jit(maxrl.in_means)(paid, mask, np.asarray(groups)))

  def test_by_hand(self):
    rewards = np.float32([1, 0, 0, 0, 1, 1, 0, 0, 0, -1, 9])
    # The mean of group 3 is negative; the last response is not judged.
    groups = [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 11]
    got = self.advantages(rewards, groups)
    expected = [3, -1, -1, -1, *[0] * 7]
    np.testing.assert_allclose(got, np.transpose([expected] * 2), atol=1e-6)

  def test_rewards_that_cancel_have_no_advantage(self):
    rewards = np.float32([1.0, 0.7, -0.8, -0.9])
    assert not self.advantages(rewards, [0] * 4).any()


class TestGdpo:
  def test_by_hand(self):
    """Three equal sums: a tie for GRPO, although one component is rarer."""
    made = make_algorithm(
      method__use=("gdpo",),
      method__gdpo__parts={"a": 1.0, "b": 0.5},
      estimator__epsilon=0.0,
    )
    assert {"part_a", "part_b"} <= made.leaves
    mask = np.ones((4, 1), bool)
    got = made.parts["advantages"](
      {
        "mask": mask,
        "trainable": mask,
        "groups": np.zeros(4, int),
        "part_a": np.float32([1, 0, 0, 0]),
        "part_b": np.float32([0, 2, 2, 0]),
      }
    )
    # Half of ±1, in standard deviations of 2 / √3.
    b = 3**0.5 / 4
    expected = [1.5 - b, -0.5 + b, -0.5 + b, -0.5 - b]
    np.testing.assert_allclose(got[:, 0], expected, rtol=1e-5)

  def test_parts_must_be_named(self):
    with pytest.raises(InputError, match="'gdpo' needs the parts"):
      make_algorithm(method__use=("gdpo",))


class TestEvpo:
  def advantages(self, use, values, others=None, **changes):
    """Computes advantages and masks of a batch from the critic's values."""
    made = make_algorithm(
      method__use=use, estimator__lambda_value=1.0, **changes
    )
    values = values.astype(np.float32)
    return make_experience(made, values=values, **others or {})

  def critic(self, sign):
    """Makes values that explain part of the outcome, or do the opposite."""
    outcome = np.where(np.arange(12) % 3 == 0, 1.0, -1.0)[:, None]
    return sign * 0.5 * outcome + 0.1 * noise(31)

  def test_a_critic_that_explains_is_vapos_in_every_bit(self):
    values = self.critic(1)
    one = self.advantages(("evpo",), values)
    other = self.advantages((), values)
    explained = masked.explained_variance(
      values, one["returns"], one["value_mask"]
    )
    assert explained > 0.5
    np.testing.assert_array_equal(one["advantages"], other["advantages"])

  def test_one_that_does_not_gives_way_to_the_mean_of_the_group(self):
    one = self.advantages(("evpo",), self.critic(-1))
    plain = {
      "estimator__name": "group",
      "estimator__scale": "none",
      "value__pretrain_steps": 0,
    }
    other = self.advantages((), self.critic(-1), **plain)
    np.testing.assert_array_equal(one["advantages"], other["advantages"])
    assert one["advantages"].any()

  def test_without_groups_it_is_the_mean_of_the_batch(self):
    judged = np.arange(12) != 4
    alone = {"group": np.arange(12), "judged": judged}
    one = self.advantages(("evpo",), self.critic(-1), alone)
    mask = make_rollout().mask
    outcome = np.where(np.arange(12) % 3 == 0, 1.0, -1.0) * mask.any(axis=1)
    centered = np.where(judged, outcome - outcome[judged].mean(), 0.0)
    expected = spread(centered, mask)
    np.testing.assert_allclose(one["advantages"], expected, rtol=1e-5)

  def test_equal_returns_have_no_advantage(self):
    """There is nothing that a critic could explain."""
    equal = {"rewards": np.zeros(12, np.float32)}
    one = self.advantages(("evpo",), self.critic(1), equal)
    assert not one["advantages"].any()

  def test_the_critic_is_trained_in_any_case(self):
    one = self.advantages(("evpo",), self.critic(-1))
    other = self.advantages((), self.critic(-1))
    for name in ("returns", "value_mask"):
      np.testing.assert_array_equal(one[name], other[name])


class TestSegments:
  def test_by_hand(self):
    """There are two segments: the first ends with the unlikely second token."""
    logprobs = np.log(np.float32([[0.9, 0.1, 0.5, 0.4]]))
    lambda_ = sae.segment_lambda(
      logprobs, lambda_policy=0.5, segment_probability=0.2
    )
    np.testing.assert_allclose(lambda_, [[1, 0.5, 1, 1]])
    values = np.float32([[0.5, 9.0, 0.4, 9.0]])  # 9.0 cancels.
    rewards, mask = np.float32([[0, 0, 0, 1]]), np.ones((1, 4), bool)
    got = estimators.gae(rewards, values, mask, gamma=1.0, lambda_=lambda_)
    # 0.4 - V + 0.5 (1 - 0.4) in the first segment, 1 - V in the second.
    expected = [[0.7 - 0.5, 0.7 - 9.0, 1 - 0.4, 1 - 9.0]]
    np.testing.assert_allclose(got, expected, rtol=1e-5)

  def test_the_config_chooses_them(self):
    made = make_algorithm(
      method__use=("sae",),
      method__sae__segment_probability=0.1,
      estimator__lambda_policy=0.7,
    )
    got = make_experience(made)["advantages"]
    rollout = make_rollout()
    outcome = np.where(np.arange(12) % 3 == 0, 1.0, -1.0)
    place = np.where(rollout.mask, np.arange(9), -1)
    last = rollout.mask & (place == place.max(axis=1, keepdims=True))
    lambdas = np.where(np.exp(rollout.behavior_logprobs) < 0.1, 0.7, 1.0)
    expected = reference.gae(
      spread(outcome, last), noise(6), rollout.mask, 1.0, lambdas
    )
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


class TestTurns:
  # Two turns of two and three tokens with an observation, and a single turn.
  MASK = np.array([[1, 1, 0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0]], bool)

  def advantages(self, rewards, values, truncated=(0, 0), mask=MASK, **changes):
    settings = {"gamma": 1.0, "boundary": "repeat"} | changes
    made = make_algorithm(**{f"estimator__{k}": x for k, x in settings.items()})
    inputs = {
      "token_rewards": rewards,
      "values": values,
      "mask": mask,
      "truncated": np.array(truncated, bool),
      "policy_lambda": np.float32([0.5, 0.5]),
      "next_values": np.float32([0.25, 0.25]),
    }
    return turn_gae.over_turns(made.advantages)(inputs)

  def inputs(self):
    rewards, values = np.zeros((2, 8), np.float32), noise(9)[:2, :8]
    rewards[0, 1], rewards[0, 6], rewards[1, 3] = 0.25, 1.0, -1.0
    return rewards, values

  def test_by_hand(self):
    rewards, values = self.inputs()
    second = 1.0 - values[0, 4]
    first = 0.25 + values[0, 4] - values[0, 0] + 0.5 * second
    expected = np.zeros((2, 8))
    expected[0, [0, 1]], expected[0, [4, 5, 6]] = first, second
    expected[1, :4] = -1.0 - values[1, 0]
    got = self.advantages(rewards, values)
    np.testing.assert_allclose(got, expected, rtol=1e-5)

  def test_turns_of_one_token_are_gae(self):
    rewards, values = self.inputs()
    mask = np.tile([True, False], (2, 4))
    one = self.advantages(rewards, values, mask=mask, gamma=0.9)
    other = estimators.gae(
      rewards + np.pad(rewards[:, 1:], ((0, 0), (0, 1))),  # Of both tokens.
      values,
      mask,
      gamma=0.9,
      lambda_=0.5,
    )
    np.testing.assert_allclose(one, other, rtol=1e-6)

  @pytest.mark.parametrize("boundary", ["repeat", "bootstrap"])
  def test_a_turn_that_goes_on(self, boundary):
    rewards, values = self.inputs()
    rewards[:, 3:] = 0.0
    got = self.advantages(rewards, values, (True, True), boundary=boundary)
    after = {"repeat": values[1, 0], "bootstrap": 0.25}[boundary]
    np.testing.assert_allclose(
      got[1], [after - values[1, 0]] * 4 + [0] * 4, rtol=1e-5
    )

  def test_the_critic_learns_at_first_tokens(self):
    made = make_algorithm(
      method__use=("turn_gae",), estimator__lambda_value=1.0
    )
    ended = np.arange(12) != 4
    status = np.where(ended, Status.FINISHED, Status.TRUNCATED)
    got = make_experience(made, status=status)
    mask = make_rollout().mask
    expected = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1] & ended[:, None]
    np.testing.assert_array_equal(got["value_mask"], expected)
    assert 0 < expected.sum() < mask.sum()
    # Monte Carlo returns, as for any critic with lambda 1.
    outcome = np.where(np.arange(12) % 3 == 0, 1.0, -1.0) * ended
    np.testing.assert_allclose(got["returns"], spread(outcome, mask))
