"""Tests of extended GAE and the handling of truncated responses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxrl_llm import estimators

_VALUES = np.array([0.5, 0.6, 0.4, 0.8], np.float32)
_VALID = np.ones(4, bool)
_CUT = np.array(True)
_SETTINGS = dict(gamma=0.97, lambda_=0.9)
_egae = jax.jit(estimators.egae, static_argnames="boundary")


def _batch(length=70, rows=8, seed=0):
  """Makes ragged rows with holes; an empty and a short row are truncated."""
  rng = np.random.default_rng(seed)
  mask = np.arange(length) < rng.integers(1, length + 1, rows)[:, None]
  mask &= rng.random((rows, length)) < 0.8
  mask[0] = True
  mask[1] = False
  mask[2] = np.arange(length) == 0
  truncated = rng.random(rows) < 0.5
  truncated[:4] = [True, True, True, False]
  rewards, values = rng.normal(size=(2, rows, length)).astype(np.float32)
  next_values = rng.normal(size=rows).astype(np.float32)
  return (
    np.where(mask, rewards, np.nan),
    np.where(mask, values, np.nan),
    mask,
    truncated,
    np.where(truncated & mask.any(1), next_values, np.nan),
  )


class TestGolden:
  @pytest.mark.parametrize(
    "boundary, expected",
    [
      ("repeat", [0.271, 0.18, 0.4, 0.0]),
      ("bootstrap", [0.3567375, 0.27025, 0.495, 0.1]),
      ("zero", [-0.4149, -0.542, -0.36, -0.8]),
    ],
  )
  def test_a_cut_response(self, boundary, expected):
    actual = _egae(
      np.zeros(4),
      _VALUES,
      _VALID,
      _CUT,
      gamma=1.0,
      lambda_=0.95,
      boundary=boundary,
      next_values=np.float32(0.9),
    )
    np.testing.assert_allclose(actual, expected, atol=1e-6)

  def test_gamma_below_one_punishes_the_last_token(self):
    settings = dict(gamma=0.9, lambda_=0.5)
    actual = _egae(np.zeros(4), _VALUES, _VALID, _CUT, **settings)
    expected = [-0.01049, -0.1122, 0.284, -0.08]
    np.testing.assert_allclose(actual, expected, atol=1e-6)

  def test_two_windows_of_one_response(self):
    """The second window ends with R = -1 and has the first one as context."""
    values = np.array([0.5, 0.6, 0.4, 0.8, 0.7, 0.2], np.float32)
    rewards = np.array([0, 0, 0, 0, 0, -1], np.float32)
    window = np.arange(6) < 4
    settings = dict(gamma=1.0, lambda_=0.95)
    first = _egae(np.zeros(6), values, window, np.array(True), **settings)
    second = _egae(rewards, values, ~window, np.array(False), **settings)
    np.testing.assert_allclose(
      first + second, [0.271, 0.18, 0.4, 0.0, -1.64, -1.2], atol=1e-6
    )
    targets = estimators.lambda_returns(
      rewards, values, np.ones(6, bool), gamma=1.0, lambda_=1.0
    )
    np.testing.assert_array_equal(targets, -1.0)


class TestEgae:
  @pytest.mark.parametrize("boundary", ["repeat", "bootstrap", "zero"])
  def test_ragged_batches_equal_reference(self, boundary):
    rewards, values, mask, truncated, next_values = _batch()
    actual = _egae(
      rewards,
      values,
      mask,
      truncated,
      boundary=boundary,
      next_values=next_values,
      **_SETTINGS,
    )
    expected = reference.egae(
      rewards,
      values,
      mask,
      truncated,
      0.97,
      0.9,
      {"bootstrap": next_values, "zero": np.zeros(8)}.get(boundary),
    )
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    np.testing.assert_array_equal(actual[~mask], 0.0)

  def test_rows_that_ended_equal_gae_in_every_bit(self):
    rewards, values, mask, truncated, _ = _batch(length=12, seed=1)
    # Compilers may round sums differently in two programs.
    with jax.disable_jit():
      plain = estimators.gae(rewards, values, mask, **_SETTINGS)
      mixed = _egae(rewards, values, mask, truncated, **_SETTINGS)
    np.testing.assert_array_equal(mixed[~truncated], plain[~truncated])


class TestBoundaryError:
  def test_mean_over_cut_rows_with_tokens(self):
    _, values, mask, truncated, next_values = _batch(seed=9)
    rows = np.flatnonzero(truncated & mask.any(1))
    last = [values[i][np.flatnonzero(mask[i])[-1]] for i in rows]
    expected = np.mean(np.abs(next_values[rows] - last))
    arrays = values, mask, truncated, next_values
    for function in (
      estimators.boundary_error,
      jax.jit(estimators.boundary_error),
    ):
      assert float(function(*arrays)) == pytest.approx(expected, rel=1e-5)

  def test_zero_if_nothing_is_cut(self):
    _, values, mask, _, next_values = _batch(seed=10)
    assert 0.0 == estimators.boundary_error(
      values, mask, np.zeros(8, bool), next_values
    )


class TestDropTail:
  @pytest.mark.parametrize("tokens", [0, 1, 3, 1000])
  def test_drops_the_last_tokens_of_cut_rows(self, tokens):
    _, _, mask, truncated, _ = _batch(seed=11)
    expected = mask.copy()
    for i in np.flatnonzero(truncated):
      kept = np.flatnonzero(mask[i])
      expected[i, kept[max(len(kept) - tokens, 0) :]] = False
    actual = estimators.drop_tail(mask, truncated, tokens=tokens)
    assert actual.dtype == bool
    np.testing.assert_array_equal(actual, expected)
    if tokens == 0:
      np.testing.assert_array_equal(actual, mask)
