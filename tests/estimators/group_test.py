"""Tests of group-relative advantages."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxrl_llm import estimators

_CENTERS = ["mean", "median", "leave_one_out"]
_SCALES = ["std", "mad", "none"]
LEAVE_ONE_OUT = {"center": "leave_one_out", "scale": "none"}
# Compiled, as in use; one test compares this with eager mode.
_group_relative = jax.jit(
  estimators.group_relative, static_argnames=["num_groups", "center", "scale"]
)


def _one_group(rewards, **settings):
  groups = np.zeros(len(rewards), np.int32)
  return _group_relative(np.array(rewards), groups, num_groups=1, **settings)


class TestGolden:
  @pytest.mark.parametrize(
    "rewards, settings, expected",
    [
      # The standard deviation is 1, to which 1e-6 is added.
      ([1, 1, 1, -1], {}, [*[0.4999995] * 3, -1.4999985]),
      ([1, 1, 1, -1], {"scale": "none"}, [*[0.5] * 3, -1.5]),
      ([1, 1, 1, -1], LEAVE_ONE_OUT, [*[2 / 3] * 3, -2.0]),
      # One of sixteen distinguishes GRPO from Dr. GRPO.
      ([1, *[-1] * 15], {}, [3.749993, *[-0.25] * 15]),
      ([1, *[-1] * 15], {"scale": "none"}, [1.875, *[-0.125] * 15]),
      ([1, -1] * 8, {}, [0.968245, -0.968245] * 8),
      (
        [0.2, 0.9, 0.4, 1.0, 0.0],
        {"center": "median", "scale": "mad", "epsilon": 1e-3},
        [-0.498753, 1.246883, 0.0, 1.496259, -0.997506],
      ),
      (
        [0.2, 0.9, 0.4, 1.0, 0.0],
        {"center": "median", "scale": "std", "epsilon": 1e-4},
        [-0.458726, 1.146816, 0.0, 1.376179, -0.917452],
      ),
    ],
  )
  def test_values(self, rewards, settings, expected):
    actual = _one_group(np.float32(rewards), **settings)
    np.testing.assert_allclose(actual, expected, atol=1e-6)

  def test_mad_is_no_scale_for_binary_rewards(self):
    settings = {"center": "median", "scale": "mad", "epsilon": 1e-3}
    actual = _one_group([1.0, 0.0, 0.0], **settings)
    np.testing.assert_allclose(actual, [1000.0, 0.0, 0.0], rtol=1e-6)


class TestProperties:
  rng = np.random.default_rng(0)
  rewards = rng.normal(size=23).astype(np.float32)
  groups = rng.permutation(np.repeat([0, 1, 2, 4, 5], [1, 2, 5, 8, 7]))
  groups = groups.astype(np.int32)

  def _call(self, rewards=None, groups=None, **settings):
    rewards = self.rewards if rewards is None else rewards
    groups = self.groups if groups is None else groups
    return _group_relative(rewards, groups, num_groups=6, **settings)

  @pytest.mark.parametrize(
    "center, scale", itertools.product(_CENTERS, _SCALES)
  )
  def test_ragged_scattered_groups_equal_reference(self, center, scale):
    settings = dict(center=center, scale=scale, epsilon=1e-3)
    actual = self._call(**settings)
    expected = reference.group_relative(
      self.rewards, self.groups.tolist(), **settings
    )
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)

  @pytest.mark.parametrize(
    "center, scale", itertools.product(_CENTERS, _SCALES)
  )
  @pytest.mark.parametrize("epsilon", [1e-6, 0.0])
  def test_single_rows_and_equal_rewards_give_exactly_zero(
    self, center, scale, epsilon
  ):
    # Means of 0.1 and 0.3 are rounded; one group has a single row.
    rewards = np.repeat(np.float32([0.1, 0.3, 5.0]), [7, 6, 1])
    groups = np.repeat(np.array([0, 1, 2]), [7, 6, 1])
    actual = self._call(
      rewards, groups, center=center, scale=scale, epsilon=epsilon
    )
    np.testing.assert_array_equal(actual, 0.0)

  def test_plain_and_mapped_equal_jitted(self):
    jitted = self._call()
    plain = estimators.group_relative(self.rewards, self.groups, num_groups=6)
    np.testing.assert_allclose(plain, jitted, rtol=1e-5, atol=1e-6)
    mapped = jax.vmap(self._call)(
      np.stack([self.rewards, 2.0 * self.rewards]), np.stack([self.groups] * 2)
    )
    np.testing.assert_allclose(mapped[0], jitted, rtol=1e-5, atol=1e-6)

  def test_rows_of_no_group_are_padding(self):
    rewards = np.append(self.rewards, [np.nan, np.nan]).astype(np.float32)
    groups = np.append(self.groups, [-1, 6]).astype(np.int32)
    actual = self._call(rewards, groups)
    np.testing.assert_array_equal(actual[:-2], self._call())
    np.testing.assert_array_equal(actual[-2:], 0.0)
    total = lambda r: jnp.sum(self._call(r, groups) ** 3)
    grad = jax.jit(jax.grad(total))(jnp.asarray(rewards))
    assert np.isfinite(grad).all()
