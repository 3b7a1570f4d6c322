"""Tests of HAPO's entropy code and its effects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxrl_llm import estimators

_ENTROPIES = np.array([0.01, 0.05, 0.2, 0.5, 1.5], np.float32)
_CLIP = dict(clip_low=0.2, clip_high=0.2)
_ALL = np.ones(5, bool)
# Compiled, as in use; one test compares this with eager mode.
_statistics = jax.jit(estimators.entropy_statistics, static_argnames="quantile")
_entropy_code = jax.jit(estimators.entropy_code, static_argnames="sign")


def _batch(seed=0):
  """Makes [6, 30] with holes, an empty and a one-token row; NaN if masked."""
  rng = np.random.default_rng(seed)
  mask = rng.random((6, 30)) < 0.5
  mask[1] = False
  mask[2] = np.arange(30) == 4
  entropies = rng.exponential(size=(6, 30)).astype(np.float32)
  entropies[mask & (rng.random((6, 30)) < 0.1)] = 0.0
  return np.where(mask, entropies, np.nan), mask


def _code(entropies, mask, sign="intended", **settings):
  statistics = _statistics(entropies, mask, **settings)
  return _entropy_code(entropies, mask, statistics, sign=sign)


class TestEntropyStatistics:
  def test_golden(self):
    actual = _statistics(_ENTROPIES, _ALL)
    assert float(actual.pivot) == pytest.approx(np.log(0.5), abs=1e-6)
    assert float(actual.rms) == pytest.approx(2.128491, abs=1e-6)
    assert float(actual.high * actual.rms) == pytest.approx(np.log(3.0))
    assert float(actual.low * actual.rms) == pytest.approx(np.log(0.02))

  @pytest.mark.parametrize("count", [1, 5, 10, 15, 20, 1000])
  @pytest.mark.parametrize("quantile", [0.0, 0.2, 0.6, 0.8, 0.9, 1.0])
  def test_pivot_is_the_nearest_rank(self, count, quantile):
    logs = np.linspace(-2.0, 1.0, count)
    order = np.random.default_rng(0).permutation(count)
    rank = max(int(np.ceil(round(quantile * count, 6))), 1)
    entropies = np.full(1000, np.nan)
    entropies[:count] = np.exp(logs)[order]
    actual = _statistics(entropies, np.arange(1000) < count, quantile=quantile)
    assert float(actual.pivot) == pytest.approx(logs[rank - 1], abs=1e-5)

  def test_no_tokens_give_zeros_and_zeros_code_nothing(self):
    entropies, mask = _batch()
    none = _statistics(entropies, np.zeros_like(mask))
    assert all(float(x) == 0.0 for x in none)
    code = _entropy_code(entropies, mask, none)
    np.testing.assert_array_equal(code, 0.0)


class TestEntropyCode:
  @pytest.mark.parametrize(
    "sign, expected",
    [
      ("intended", [-1.0, -0.588592, -0.234224, 0.0, 1.0]),
      ("released", [1.0, 0.588592, 0.234224, 0.0, 1.0]),
    ],
  )
  def test_golden(self, sign, expected):
    actual = _code(_ENTROPIES, _ALL, sign)
    np.testing.assert_allclose(actual, expected, atol=1e-6)

  @pytest.mark.parametrize("quantile", [0.5, 0.8])
  def test_ragged_batches_equal_reference(self, quantile):
    entropies, mask = _batch(1)

    def function(entropies, mask):
      statistics = estimators.entropy_statistics(
        entropies, mask, quantile=quantile
      )
      return estimators.entropy_code(entropies, mask, statistics)

    expected = reference.entropy_code(entropies, mask, quantile)
    split = [x.reshape(2, 3, 30) for x in (entropies, mask)]
    for actual in (
      function(entropies, mask),
      jax.jit(function)(entropies, mask),
      function(*split).reshape(6, 30),
    ):
      np.testing.assert_allclose(actual, expected, atol=2e-5)
      np.testing.assert_array_equal(actual[~mask], 0.0)

  def test_beyond_earlier_statistics_it_is_held_at_one(self):
    statistics = _statistics(_ENTROPIES, _ALL)
    code = _entropy_code(np.array([0.0, 50.0]), np.ones(2, bool), statistics)
    np.testing.assert_array_equal(code, [-1.0, 1.0])

  def test_equal_entropies_code_nothing(self):
    code = _code(np.full((2, 3), 0.7), np.ones((2, 3), bool))
    np.testing.assert_array_equal(code, 0.0)


class TestAdaptiveClip:
  def test_one_bound_moves_and_zero_moves_none(self):
    code = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    low, high = estimators.adaptive_clip(code, clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(low, [0.4, 0.3, 0.2, 0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(high, [0.28, 0.28, 0.28, 0.42, 0.56], rtol=1e-6)
    assert low[2] == np.float32(0.2) and high[2] == np.float32(0.28)


class TestRedistribute:
  def test_every_case(self):
    """Raised outside the neutral zone if uncertain, damped inside if not."""
    code = np.float32([0.5, 0.5, 0.5, -0.5, -0.5, -0.5, 0.0, 0.0])
    ratio = np.float32([0.85, 0.92, 1.2, 0.85, 1.08, 1.2, 0.5, 1.0])
    advantages = np.float32([2, 2, -2, 2, 2, -2, 2, -2])
    actual = estimators.redistribute(advantages, code, ratio, **_CLIP)
    np.testing.assert_array_equal(actual, [3, 2, -3, 2, 1, -2, 2, -2])


class TestAdaptiveTemperature:
  def test_follows_the_code_within_one(self):
    code = jnp.array([-7.0, -1.0, 0.0, 0.5, 3.0])
    actual = estimators.adaptive_temperature(code, temperature=0.8, tau=0.05)
    np.testing.assert_allclose(
      actual, 0.8 * np.array([0.95, 0.95, 1.0, 1.025, 1.05]), rtol=1e-6
    )
    assert actual[2] == np.float32(0.8)
