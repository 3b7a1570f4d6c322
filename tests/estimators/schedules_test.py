"""Tests of settings that depend on the data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxrl_llm import estimators


class TestLengthAdaptiveLambda:
  lengths = [0, 1, 10, 20, 40, 100, 400, 1000, 8192, 20480, 24576]
  golden = [
    0.0,
    0.0,
    0.0,
    0.0,
    0.5,
    0.8,
    0.95,
    0.98,
    0.99755859375,
    0.9990234375,
    0.99918619792,
  ]

  def test_golden(self):
    lambda_ = estimators.length_adaptive_lambda(
      np.array(self.lengths), alpha=0.05
    )
    assert lambda_.dtype == jnp.float32
    np.testing.assert_allclose(lambda_, self.golden, atol=1e-6)
    np.testing.assert_array_equal(lambda_[:3], 0.0)
    wide = estimators.length_adaptive_lambda(jnp.array(100), alpha=1.5)
    assert float(wide) == pytest.approx(0.99333333, abs=1e-6)

  def test_weight_of_the_last_error_on_the_first_token(self):
    lengths = np.array([100, 400, 1000, 8192])
    lambda_ = estimators.length_adaptive_lambda(lengths, alpha=0.05)
    weight = np.asarray(lambda_, np.float64) ** (lengths - 1)
    expected = [2.546e-10, 1.293e-9, 1.717e-9, 2.016e-9]
    np.testing.assert_allclose(weight, expected, rtol=1e-3)

  def test_equals_reference_for_any_shape_and_under_jit(self):
    lengths = np.random.default_rng(0).integers(0, 3000, (4, 5))
    function = lambda x: estimators.length_adaptive_lambda(x, alpha=0.1)
    expected = np.vectorize(reference.length_adaptive_lambda)(lengths, 0.1)
    np.testing.assert_allclose(function(lengths), expected, atol=1e-6)
    np.testing.assert_allclose(jax.jit(function)(lengths), expected, atol=1e-6)

  @pytest.mark.parametrize("alpha", [0.0, -0.05, float("nan")])
  def test_bad_alpha_raises(self, alpha):
    with pytest.raises(ValueError, match="expected a number in"):
      estimators.length_adaptive_lambda(np.array([3]), alpha=alpha)

  def test_feeds_gae_one_lambda_per_row(self):
    lengths = np.array([40, 0, 3])
    mask = np.arange(40) < lengths[:, None]
    rewards, values = np.random.default_rng(1).normal(size=(2, 3, 40))
    actual = estimators.gae(
      rewards,
      values,
      mask,
      gamma=1.0,
      lambda_=estimators.length_adaptive_lambda(lengths, alpha=0.05),
    )
    expected = reference.gae(
      rewards, values, mask, 1.0, np.array([[0.5], [0.0], [0.0]])
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)
