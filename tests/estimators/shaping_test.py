"""Tests of steps around estimators, and of REINFORCE++ composed of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxrl_llm import estimators


class TestSoftOverlongPunishment:
  def test_golden_exactly(self):
    lengths = [100, 16384, 16385, 17408, 18432, 20479, 20480, 20481]
    expected = [0, 0, -(2**-12), -0.25, -0.5, 2**-12 - 1, -1, -1]
    for factor in (1.0, 2.0):
      actual = estimators.soft_overlong_punishment(
        lengths, max_length=20480, buffer=4096, factor=factor
      )
      assert actual.dtype == jnp.float32
      np.testing.assert_array_equal(actual, factor * np.float32(expected))


class TestPenalizeKl:
  def test_subtracts_k1_at_unmasked_tokens(self):
    rng = np.random.default_rng(0)
    rewards, logprobs, ref = rng.normal(size=(3, 4, 6)).astype(np.float32)
    mask = rng.random((4, 6)) < 0.5
    mask[1] = False
    function = lambda *x: estimators.penalize_kl(*x, coefficient=0.1)
    dirty = [np.where(mask, x, np.nan) for x in (rewards, logprobs, ref)]
    expected = np.where(mask, rewards - 0.1 * (logprobs - ref), 0.0)
    for actual in (function(*dirty, mask), jax.jit(function)(*dirty, mask)):
      np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


class TestLengthAdaptiveLambda:
  def test_golden(self):
    lengths = [[0, 1, 10, 20, 40, 100], [400, 1000, 8192, 20480, 24576, 10**9]]
    expected = [0, 0, 0, 0, 0.5, 0.8, 0.95, 0.98]
    expected += [0.99755859375, 0.9990234375, 0.99918619792, 1]
    lambda_ = estimators.length_adaptive_lambda(lengths, alpha=0.05)
    assert lambda_.dtype == jnp.float32
    np.testing.assert_allclose(np.ravel(lambda_), expected, atol=1e-6)
    np.testing.assert_array_equal(lambda_[0, :3], 0.0)
    wide = estimators.length_adaptive_lambda(jnp.array(100), alpha=1.5)
    assert float(wide) == pytest.approx(0.99333333, abs=1e-6)


# Compiled, as in use; one test compares this with eager mode.
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

  @pytest.mark.parametrize("center", [True, False])
  def test_empty_and_constant_batches_stay_finite(self, center):
    advantages, mask = _batch(2)
    empty = _whiten(advantages, np.zeros_like(mask), center=center)
    np.testing.assert_array_equal(empty, 0.0)
    zeros = _whiten(np.where(mask, 0.0, np.nan), mask, center=center)
    np.testing.assert_array_equal(zeros, 0.0)

  @pytest.mark.parametrize("value", [-1.0, -0.1, 3.0])
  def test_equal_advantages_are_not_blown_up(self, value):
    mask = jnp.array([[True] * 5, [True, True, False, False, False]])
    advantages = jnp.where(mask, value, jnp.nan)
    got = estimators.whiten(advantages, mask, center=False)
    np.testing.assert_array_equal(got, jnp.where(mask, value, 0.0))
