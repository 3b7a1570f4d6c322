"""Tests of the clipped surrogate; ragged_test.py compares to a reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import losses

_CLIP = dict(clip_low=0.2, clip_high=0.28)


def _tokens(seed=0, shape=(4, 50)):
  rng = np.random.default_rng(seed)
  old = -rng.exponential(size=shape).astype(np.float32)
  logprobs = old + rng.normal(size=shape).astype(np.float32)
  return logprobs, old, rng.normal(size=shape).astype(np.float32)


class TestGolden:
  @pytest.mark.parametrize(
    "ratio, advantage, loss, slope, plain_loss",
    [
      (1.0, 1.0, -1.0, -1.0, -1.0),
      (1.2, 1.0, -1.2, -1.0, -1.2),
      (1.5, 1.0, -1.28, 0.0, -1.28),
      (0.5, 1.0, -0.5, -1.0, -0.5),
      (1.5, -1.0, 1.5, 1.0, 1.5),
      (0.5, -1.0, 0.8, 0.0, 0.8),
      (2.5, -1.0, 2.5, 1.0, 2.5),
      (5.0, -1.0, 3.0, 0.0, 5.0),
      (5.0, 2.0, -2.56, 0.0, -2.56),
      (4.0, -0.5, 1.5, 0.0, 2.0),
    ],
  )
  def test_values_and_slopes(self, ratio, advantage, loss, slope, plain_loss):
    def total(ratio, dual_clip=3.0):
      return losses.clipped_policy_loss(
        jnp.log(ratio),
        jnp.zeros(()),
        jnp.array(advantage),
        dual_clip=dual_clip,
        **_CLIP,
      ).loss

    value, gradient = jax.value_and_grad(total)(jnp.float32(ratio))
    assert float(value) == pytest.approx(loss, abs=1e-6)
    assert float(gradient) == pytest.approx(slope, abs=1e-6)
    plain = total(jnp.float32(ratio), None)
    assert float(plain) == pytest.approx(plain_loss, abs=1e-6)


class TestProperties:
  def test_flags_mark_clipped_tokens(self):
    logprobs, old, advantages = _tokens(1)
    result = losses.clipped_policy_loss(
      logprobs, old, advantages, dual_clip=3.0, **_CLIP
    )
    ratio = np.exp(logprobs - old)
    high = (advantages > 0) & (ratio > 1.28)
    low = (advantages < 0) & (ratio < 0.8)
    dual = (advantages < 0) & (ratio > 3.0)
    np.testing.assert_allclose(result.ratio, ratio, rtol=1e-5)
    np.testing.assert_array_equal(result.clipped_high, high)
    np.testing.assert_array_equal(result.clipped_low, low)
    np.testing.assert_array_equal(result.dual_clipped, dual)
    assert high.any() and low.any() and dual.any()

  def test_bounds_may_be_infinite(self):
    logprobs, old, advantages = _tokens(4)
    free = losses.clipped_policy_loss(
      logprobs, old, advantages, clip_low=np.inf, clip_high=np.inf
    )
    np.testing.assert_allclose(
      free.loss, -advantages * np.exp(logprobs - old), rtol=1e-5
    )

  def test_far_apart_policies_stay_finite(self):
    logprobs = jnp.array([0.0, -300.0])
    result, pullback = jax.vjp(
      lambda x: (
        losses.clipped_policy_loss(
          x, logprobs[::-1], jnp.array([-1.0, 1.0]), **_CLIP
        ).loss
      ),
      logprobs,
    )
    np.testing.assert_allclose(result, np.exp([20.0, -20.0]) * [1, -1])
    np.testing.assert_array_equal(pullback(jnp.ones(2))[0], 0.0)


class TestCispo:
  def test_flags_a_bounded_weight_from_above(self):
    logprobs, old, advantages = _tokens(7)
    result = losses.cispo_loss(logprobs, old, advantages, clip_high=0.28)
    high = np.exp(logprobs - old) > 1.28
    np.testing.assert_array_equal(result.clipped_high, high)
    assert not result.clipped_low.any() and not result.dual_clipped.any()
