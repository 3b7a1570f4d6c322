"""Tests of token-level groups, the median pivot and the optimal baseline."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxrl_llm import estimators, masked

# Compiled, as in use; tests of padding compare this with eager mode.
_group = jax.jit(
  estimators.group_relative, static_argnames=["num_groups", "center", "scale"]
)
_token_group = jax.jit(
  estimators.token_group_relative, static_argnames="num_groups"
)
_pivot = jax.jit(estimators.median_pivot, static_argnames="num_groups")
_baseline = jax.jit(estimators.optimal_baseline, static_argnames="num_groups")


def _batch(seed=0):
  """Makes ragged groups 0..5, unordered, without ties; 3 is empty, 0 single."""
  rng = np.random.default_rng(seed)
  groups = rng.permutation(np.repeat([0, 1, 2, 4, 5], [1, 2, 5, 8, 7]))
  rewards = rng.normal(size=23).astype(np.float32)
  lengths = rng.integers(0, 40, 23).astype(np.int32)
  return rewards, lengths, groups.astype(np.int32)


def _pad(x, value):
  return np.append(x, [value] * 2).astype(x.dtype)


class TestTokenGroupRelative:
  def test_golden(self):
    actual = _token_group(
      np.float32([1, -1, 1, 1, 1, -1]),
      np.array([10, 30, 7, 7, 7, 7]),
      np.int32([0, 0, 1, 1, 1, 1]),
      num_groups=2,
    )
    # The deviation is the population's; GRPO's would give 0.5 in group 1.
    golden = [1.732049, -0.57735, 0.57735, 0.57735, 0.57735, -1.732049]
    np.testing.assert_allclose(actual, golden, atol=1e-6)

  def test_a_response_without_a_token_does_not_exist(self):
    rewards, lengths, groups = _batch(7)
    lengths[::3] = 0
    lengths[1::6] = 1
    actual = _token_group(
      np.where(lengths == 0, np.nan, rewards).astype(np.float32),
      lengths,
      groups,
      num_groups=6,
      epsilon=1e-3,
    )
    expected = reference.token_group_relative(
      rewards, lengths, groups.tolist(), 1e-3, 5.0
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(actual[lengths == 0], 0.0)

  @pytest.mark.parametrize("limit", [5.0, 1.5, np.inf])
  def test_ragged_scattered_groups_equal_reference(self, limit):
    for seed in range(3):
      rewards, lengths, groups = _batch(seed)
      actual = _token_group(
        rewards, lengths, groups, num_groups=6, epsilon=1e-3, limit=limit
      )
      expected = reference.token_group_relative(
        rewards, lengths, groups.tolist(), 1e-3, limit
      )
      assert actual.dtype == jnp.float32
      np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)

  def test_a_short_response_that_stands_alone_falls_back_to_grpo(self):
    """One token of 401 would have advantage 20; the other group stays as is."""
    rewards = np.float32([1, -1, -1, 1, -1])
    lengths = np.int32([1, 200, 200, 10, 30])
    groups = np.int32([0, 0, 0, 1, 1])
    call = functools.partial(_token_group, rewards, lengths, groups)
    free = call(num_groups=2, limit=np.inf)
    held = call(num_groups=2)
    grpo = _group(rewards, groups, num_groups=2)
    assert free[0] == pytest.approx(20.0, rel=1e-4)
    np.testing.assert_allclose(held[:3], grpo[:3], rtol=1e-6)
    np.testing.assert_array_equal(held[3:], free[3:])

  @pytest.mark.parametrize("epsilon", [1e-6, 0.0])
  def test_equal_rewards_and_single_rows_give_exactly_zero(self, epsilon):
    rewards = np.repeat(np.float32([0.1, 0.3, 5.0]), [7, 6, 1])
    groups = np.repeat(np.int32([0, 1, 2]), [7, 6, 1])
    lengths = np.arange(14, dtype=np.int32)
    actual = _token_group(
      rewards, lengths, groups, num_groups=4, epsilon=epsilon
    )
    np.testing.assert_array_equal(actual, 0.0)

  def test_padding_and_jit_change_nothing(self):
    rewards, lengths, groups = _batch(5)
    wide = _pad(rewards, np.nan), _pad(lengths, 9), _pad(groups, -1)
    plain = estimators.token_group_relative(
      rewards, lengths, groups, num_groups=6
    )
    actual = _token_group(*wide, num_groups=6)
    np.testing.assert_allclose(actual[:-2], plain, atol=1e-5)
    np.testing.assert_array_equal(actual[-2:], 0.0)


class TestMedianPivot:
  def test_golden(self):
    groups = np.zeros(5, np.int32)
    pivot = _pivot(np.array([0.2, 0.9, 0.4, 1.0, 0.0]), groups, num_groups=1)
    np.testing.assert_array_equal(pivot, np.arange(5) == 2)

  def test_of_tied_rows_the_first_is_the_pivot(self):
    """[0, 1, 0 | 1, 1, 0, 0]: the even group has the lower middle, 0."""
    rewards = np.float32([1, 0, 1, 0, 1, 0, 0])
    groups = np.int32([1, 0, 0, 0, 1, 1, 1])
    pivot = _pivot(rewards, groups, num_groups=2)
    np.testing.assert_array_equal(np.flatnonzero(pivot), [1, 5])

  @pytest.mark.parametrize("binary", [False, True])
  def test_one_row_of_every_group_equal_to_the_reference(self, binary):
    for seed in range(3):
      rewards, _, groups = _batch(seed)
      rewards = (rewards > 0).astype(np.float32) if binary else rewards
      expected = reference.median_pivot(rewards, groups.tolist())
      actual = _pivot(
        _pad(rewards, np.nan),
        np.append(groups, np.int32([-1, 6])),
        num_groups=6,
      )
      assert actual.dtype == bool
      np.testing.assert_array_equal(actual[:-2], expected)
      assert not actual[-2:].any()
      pivots = groups[actual[:-2]]
      count = masked.segment_count(pivots, num_segments=6)
      np.testing.assert_array_equal(count, [1, 1, 1, 0, 1, 1])


class TestOptimalBaseline:
  def _batch(self, seed=0):
    rewards, lengths, groups = _batch(seed)
    weights = np.exp(np.random.default_rng(seed).normal(size=23))
    return rewards, weights.astype(np.float32), lengths, groups

  def test_ragged_scattered_groups_equal_reference(self):
    for seed in range(3):
      rewards, weights, norms, groups = self._batch(seed)
      expected = reference.optimal_baseline(rewards, weights, norms, groups)
      wide = [_pad(x, np.nan) for x in (rewards, weights)]
      wide += [_pad(norms, 3), np.append(groups, np.int32([-1, 6]))]
      actual = _baseline(*wide, num_groups=6)
      assert actual.dtype == jnp.float32
      np.testing.assert_allclose(actual[:-2], expected, rtol=1e-5, atol=1e-6)
      np.testing.assert_array_equal(actual[-2:], 0.0)
    plain = estimators.optimal_baseline(
      rewards, weights, norms, groups, num_groups=6
    )
    np.testing.assert_allclose(plain, actual[:-2], rtol=1e-6, atol=1e-6)

  def test_equal_weights_are_leave_one_out(self):
    rewards, _, _, groups = self._batch(4)
    ones = np.ones(23)
    baseline = _baseline(rewards, ones, ones, groups, num_groups=6)
    rloo = _group(
      rewards, groups, num_groups=6, center="leave_one_out", scale="none"
    )
    np.testing.assert_allclose(rewards - baseline, rloo, atol=1e-5)

  def test_one_row_that_outweighs_all_keeps_the_digits_of_the_others(self):
    baseline = _baseline(
      np.float32([1, 0.25, 0.75]),
      np.float32([1e6, 1, 1]),
      np.ones(3),
      np.zeros(3, np.int32),
      num_groups=1,
    )
    np.testing.assert_allclose(baseline, [0.5, 1.0, 1.0], rtol=1e-6)
