"""Tests of the overlong punishment and of KL in the reward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxrl_llm import estimators


class TestSoftOverlongPunishment:
  @pytest.mark.parametrize(
    "length, expected",
    [
      (100, 0.0),
      (16384, 0.0),
      (16385, -0.000244140625),
      (17408, -0.25),
      (18432, -0.5),
      (20479, -0.999755859375),
      (20480, -1.0),
      (20481, -1.0),
    ],
  )
  def test_golden_exactly(self, length, expected):
    actual = estimators.soft_overlong_punishment(
      jnp.array(length), max_length=20480, buffer=4096
    )
    assert actual.dtype == jnp.float32
    assert float(actual) == expected

  def test_equals_reference_and_is_monotone(self):
    lengths = np.arange(60).reshape(3, 20)
    function = lambda x: estimators.soft_overlong_punishment(
      x, max_length=37, buffer=13, factor=2.0
    )
    expected = 2.0 * np.vectorize(reference.overlong)(lengths, 37, 13)
    for actual in (function(lengths), jax.jit(function)(lengths)):
      np.testing.assert_allclose(actual, expected, rtol=1e-6)
      np.testing.assert_array_equal(actual[lengths <= 24], 0.0)
      np.testing.assert_array_equal(actual[lengths >= 37], -2.0)
      assert (np.diff(actual.ravel()) <= 0).all()

  @pytest.mark.parametrize(
    "settings, message",
    [
      (dict(max_length=10, buffer=0), "buffer=0"),
      (dict(max_length=10, buffer=11), "buffer=11"),
      (dict(max_length=10, buffer=5, factor=-1.0), "factor=-1.0"),
    ],
  )
  def test_bad_settings_raise(self, settings, message):
    with pytest.raises(ValueError, match=message):
      estimators.soft_overlong_punishment(np.ones(2), **settings)


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

  def test_the_policy_gradient_of_the_cost_is_that_of_the_kl(self):
    """E[cost ∇log π] = ∇KL(π ‖ π_ref), by summing over three tokens."""
    law = jnp.array([0.5, 0.3, 0.2])
    reference_logprobs = jnp.log(jnp.array([0.2, 0.5, 0.3]))
    cost = -estimators.penalize_kl(
      jnp.zeros(3),
      jnp.log(law),
      reference_logprobs,
      jnp.ones(3, bool),
      coefficient=1.0,
    )
    scored = lambda z: jnp.sum(law * cost * jax.nn.log_softmax(z))
    np.testing.assert_allclose(
      jax.grad(scored)(jnp.log(law)),
      [0.346243, -0.220389, -0.125854],
      atol=1e-6,
    )

  def test_bad_input_raises(self):
    ones = np.ones((2, 3))
    with pytest.raises(ValueError, match="coefficient=-0.1"):
      estimators.penalize_kl(ones, ones, ones, ones, coefficient=-0.1)
    with pytest.raises(AssertionError):
      estimators.penalize_kl(ones, ones, ones[0], ones, coefficient=0.1)
