"""Tests of the off-policy corrections."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from helpers import ragged

from jaxrl_llm import losses

_CLIP = dict(clip_low=0.2, clip_high=0.28)
_LEVELS = ["token", "sequence", "geometric"]


def _tokens(seed=0, shape=(4, 50)):
  """Makes logprobs, proximal, behavior and advantages."""
  rng = np.random.default_rng(seed)
  behavior = -rng.exponential(size=shape)
  proximal = behavior + 0.3 * rng.normal(size=shape)
  logprobs = proximal + 0.5 * rng.normal(size=shape)
  advantages = rng.normal(size=shape)
  return [
    x.astype(np.float32) for x in (logprobs, proximal, behavior, advantages)
  ]


class TestImportance:
  @pytest.mark.parametrize(
    "differences, level, expected",
    [
      ([0.5, 1.0, -0.5, -2.5], "token", [1.6487213, 2.0, 0.6065307, 0.0820850]),
      ([0.1, -0.05, 0.2, 0.03], "sequence", 1.3231298),
      ([0.1, -0.05, 0.2, 0.03], "geometric", 1.0725082),
    ],
  )
  def test_golden(self, differences, level, expected):
    arrays = np.array(differences), np.zeros(4), np.ones(4, bool)
    weights, keep = losses.truncated_importance(*arrays, level=level, high=2.0)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert keep.all()

  @pytest.mark.parametrize("level", _LEVELS)
  def test_ragged_batches_equal_reference(self, level):
    proximal, behavior, _, mask = ragged.batch(0, 0.4)
    arrays = proximal, behavior, mask
    ratio = reference.importance(*arrays, level)
    settings = dict(level=level, low=0.9, high=1.1)
    inside = mask & (ratio >= 0.9) & (ratio <= 1.1)
    assert inside.any() and (mask & ~inside).any()
    expected = {
      losses.truncated_importance: (np.clip(ratio, 0.9, 1.1) * mask, mask),
      losses.masked_importance: (ratio * inside, inside),
    }
    for function, (weights, keep) in expected.items():
      function = functools.partial(function, **settings)
      split = [x.reshape(2, 3, 12) for x in arrays]
      leading = jax.tree.map(lambda x: x.reshape(6, 12), function(*split))
      for actual in (function(*arrays), jax.jit(function)(*arrays), leading):
        assert actual.weights.dtype == jnp.float32
        assert actual.keep.dtype == bool
        np.testing.assert_allclose(actual.weights, weights, rtol=1e-5)
        np.testing.assert_array_equal(actual.keep, keep)

  @pytest.mark.parametrize("level", _LEVELS)
  def test_far_apart_policies_stay_finite(self, level):
    arrays = np.float32([[400.0] * 2, [-400.0] * 2]), np.zeros((2, 2))
    weights, _ = losses.truncated_importance(
      *arrays, np.ones((2, 2), bool), level=level, high=np.inf
    )
    np.testing.assert_allclose(
      weights, np.exp([[20.0] * 2, [-20.0] * 2]), rtol=1e-5
    )


class TestDecoupledPolicyLoss:
  @pytest.mark.parametrize(
    "advantage, objective", [(1.0, 1.465683), (-1.0, -1.648721)]
  )
  def test_golden(self, advantage, objective):
    result = losses.decoupled_policy_loss(
      jnp.array(-1.5),
      jnp.array(-1.8),
      jnp.array(-2.0),
      jnp.array(advantage),
      clip_low=0.2,
      clip_high=0.2,
    )
    assert float(result.loss) == pytest.approx(-objective, abs=1e-6)
    assert float(result.ratio) == pytest.approx(1.349859, abs=1e-6)

  def test_proximal_equal_to_behavior_is_ppo_in_every_bit(self):
    logprobs, proximal, _, advantages = _tokens(1)
    decoupled = losses.decoupled_policy_loss(
      logprobs, proximal, proximal, advantages, cap=1.0, **_CLIP
    )
    ppo = losses.clipped_policy_loss(logprobs, proximal, advantages, **_CLIP)
    jax.tree.map(np.testing.assert_array_equal, decoupled, ppo)

  def test_no_gradient_flows_through_the_weight(self):
    logprobs, proximal, behavior, advantages = _tokens(3)
    total = lambda b: losses.decoupled_policy_loss(
      logprobs, proximal, b, advantages, **_CLIP
    ).loss.sum()
    np.testing.assert_array_equal(jax.grad(total)(behavior), 0.0)


@jax.jit
def interpolated(logprobs, behavior, version):
  """Computes A-3PO's proximal log-probs with its two functions."""
  share = losses.interpolation_share(
    version, proximal_version=8, current_version=10
  )
  return losses.mixed_logprobs(logprobs, behavior, share)


class TestInterpolatedLogprobs:
  def test_mixed_versions_in_one_row(self):
    """Both ends are exact; tokens of the current version keep log-probs."""
    logprobs, _, behavior, _ = _tokens(5, (2, 6))
    version = np.array([[8, 6, 4, 9, 10, 2], [0, 1, 7, 8, 9, 10]])
    share = [[0, 0.5, 4 / 6, 0, 0, 0.75], [0.8, 7 / 9, 1 / 3, 0, 0, 0]]
    expected = behavior + np.array(share) * (logprobs - behavior)
    actual = interpolated(logprobs, behavior, version)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    own = np.array(share) == 0
    np.testing.assert_array_equal(actual[own], behavior[own])


class TestEffectiveSampleRatio:
  def test_equal_weights_one_hot_and_formula(self):
    ratio = jax.jit(losses.effective_sample_ratio)
    every = np.ones(8, bool)
    assert float(ratio(np.full(8, 0.3), every)) == pytest.approx(1.0)
    assert float(ratio(np.eye(8)[3], every)) == pytest.approx(1 / 8)
    weights = np.exp(np.random.default_rng(0).normal(size=8))
    expected = weights.sum() ** 2 / (8 * (weights**2).sum())
    # The scale does not matter, even if squares overflow.
    for scale in (1.0, 1e-12, 1e25):
      actual = ratio((scale * weights).astype(np.float32), every)
      assert float(actual) == pytest.approx(expected, rel=1e-5)

  def test_masked_entries_do_not_exist(self):
    weights = np.array([[2.0, np.nan], [1.0, np.inf]])
    mask = np.array([[True, False], [True, False]])
    actual = losses.effective_sample_ratio(weights, mask)
    assert float(actual) == pytest.approx(0.9)
    none = losses.effective_sample_ratio(weights, np.zeros_like(mask))
    assert float(none) == 1.0
    rejected = losses.effective_sample_ratio(np.zeros(3), np.ones(3, bool))
    assert float(rejected) == 0.0


class TestEwmaUpdate:
  def test_golden(self):
    average, weight = {"w": jnp.zeros(2)}, 1.0
    update = jax.jit(losses.ewma_update)
    for params, expected_weight, expected in [
      (1.0, 1.5, 0.666667),
      (2.0, 1.75, 1.428571),
      (3.0, 1.875, 2.266667),
    ]:
      params = {"w": jnp.full(2, params)}
      average, weight = update(average, weight, params, decay=0.5)
      assert float(weight) == pytest.approx(expected_weight, abs=1e-6)
      np.testing.assert_allclose(average["w"], expected, atol=1e-6)

  def test_no_decay_gives_the_parameters_in_every_bit(self):
    rng = np.random.default_rng(0)
    old, new = ({"a": {"b": rng.normal(size=(3, 2))}} for _ in range(2))
    old, new = (jax.tree.map(jnp.float32, x) for x in (old, new))
    average, weight = losses.ewma_update(old, 1.7, new, decay=0.0)
    np.testing.assert_array_equal(average["a"]["b"], new["a"]["b"])
    assert float(weight) == 1.0
