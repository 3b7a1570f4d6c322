"""Tests of whitening over the batch, and of REINFORCE++ made of steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxrl_llm import estimators

# Compiled, as one would use it; one test holds jit against plain.
_whiten = jax.jit(estimators.whiten, static_argnames="center")


def _batch(seed=0):
  rng = np.random.default_rng(seed)
  mask = rng.random((5, 9)) < 0.6
  mask[1] = False
  mask[2] = np.arange(9) == 4
  advantages = 3.0 + rng.normal(size=(5, 9)).astype(np.float32)
  return np.where(mask, advantages, np.nan).astype(np.float32), mask


class TestWhiten:
  def test_golden(self):
    advantages = np.array([0.442475, 0.3605, 0.59, 0.2])
    expected = [0.271792, -0.231928, 1.178305, -1.218169]
    actual = _whiten(advantages, np.ones(4, bool))
    np.testing.assert_allclose(actual, expected, atol=1e-6)

  @pytest.mark.parametrize("center", [True, False])
  def test_equals_reference_with_nan_in_padding(self, center):
    advantages, mask = _batch()
    function = lambda a, m: estimators.whiten(a, m, center=center, epsilon=1e-3)
    expected = reference.whiten(advantages, mask, center, 1e-3)
    for result in (
      function(advantages, mask),
      jax.jit(function)(advantages, mask),
      function(*(x.reshape(5, 3, 3) for x in (advantages, mask))).reshape(5, 9),
    ):
      assert result.dtype == jnp.float32
      np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda a: jnp.sum(function(a, mask) ** 3))(advantages)
    np.testing.assert_array_equal(gradient[~mask], 0.0)
    assert np.isfinite(gradient).all()

  def test_without_center_zeros_and_signs_stay(self):
    advantages, mask = _batch(1)
    advantages = np.where(np.arange(9) % 3 == 0, 0.0, advantages - 3.0)
    actual = _whiten(advantages, mask, center=False)
    np.testing.assert_array_equal(
      np.sign(actual), np.where(mask, np.sign(np.nan_to_num(advantages)), 0.0)
    )

  @pytest.mark.parametrize("center", [True, False])
  def test_empty_and_constant_batches_stay_finite(self, center):
    advantages, mask = _batch(2)
    empty = _whiten(advantages, np.zeros_like(mask), center=center)
    np.testing.assert_array_equal(empty, 0.0)
    zeros = _whiten(np.where(mask, 0.0, np.nan), mask, center=center)
    np.testing.assert_array_equal(zeros, 0.0)

  def test_bad_input_raises(self):
    with pytest.raises(ValueError, match="epsilon=-1.0"):
      estimators.whiten(np.ones(3), np.ones(3, bool), epsilon=-1.0)
    with pytest.raises(AssertionError):
      estimators.whiten(np.ones((2, 3)), np.ones(3, bool), center=False)


class TestReinforcePlusPlus:
  """Reward to go, then whitening; the group's mean first as a baseline."""

  rewards = np.array([1, 1, 0, 0, 1, 0, 0, 0], np.float32)
  groups = np.repeat(np.arange(2), 4)

  def _reward_to_go(self, rewards):
    """[8, 3], with the outcome on the last of three tokens."""
    token_rewards = np.zeros((8, 3), np.float32)
    token_rewards[:, -1] = rewards
    return estimators.lambda_returns(
      token_rewards,
      np.zeros((8, 3)),
      np.ones((8, 3), bool),
      gamma=1.0,
      lambda_=1.0,
    )

  def test_global(self):
    returns = self._reward_to_go(self.rewards)
    actual = _whiten(returns, np.ones((8, 3), bool))
    # Bessel over 24 tokens, against the population's 1.290994 and -0.774597.
    expected = np.where(self.rewards == 1, 1.290994, -0.774597)
    expected = np.repeat(expected[:, None], 3, 1) * np.sqrt(23 / 24)
    np.testing.assert_allclose(actual, expected, atol=1e-6)

  def test_with_a_group_baseline(self):
    centered = estimators.group_relative(
      self.rewards, self.groups, num_groups=2, scale="none"
    )
    actual = _whiten(centered, np.ones(8, bool))
    expected = [1.0, 1.0, -1.0, -1.0, 1.5, -0.5, -0.5, -0.5]
    np.testing.assert_allclose(actual, expected, atol=1e-6)
