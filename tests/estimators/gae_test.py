"""Tests of generalised advantage estimation and λ-returns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxrl_llm import estimators

_VALUES = np.array([0.5, 0.6, 0.4, 0.8], np.float32)
_REWARDS = np.array([0.0, 0.0, 0.0, 1.0], np.float32)
_VALID = np.ones(4, bool)
# Compiled, as in use; TestTransformations compares this with eager mode.
_gae = jax.jit(estimators.gae)
_lambda_returns = jax.jit(estimators.lambda_returns)
_BOTH = [
  pytest.param(_gae, reference.gae, id="gae"),
  pytest.param(_lambda_returns, reference.lambda_returns, id="lambda_returns"),
]


def _batch(length, rows=6, seed=0):
  """Makes ragged rows with holes, one empty, one of length 1; NaN if masked."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, length + 1, rows)
  lengths[0] = length
  mask = np.arange(length) < lengths[:, None]
  mask &= rng.random((rows, length)) < 0.8
  mask[1] = False
  mask[2] = np.arange(length) == length // 2
  rewards, values = rng.normal(size=(2, rows, length)).astype(np.float32)
  bootstrap = rng.normal(size=rows).astype(np.float32)
  rewards = np.where(mask, rewards, np.nan)
  values = np.where(mask, values, np.nan)
  return rewards, values, mask, bootstrap


class TestGolden:
  @pytest.mark.parametrize(
    "gamma, lambda_, advantages",
    [
      (1.0, 0.95, [0.442475, 0.3605, 0.59, 0.2]),
      (1.0, 1.0, [0.5, 0.4, 0.6, 0.2]),
      (1.0, 0.0, [0.1, -0.2, 0.4, 0.2]),
      (0.9, 0.0, [0.04, -0.24, 0.32, 0.2]),
      (0.9, 0.5, [0.015025, -0.0555, 0.41, 0.2]),
    ],
  )
  def test_terminal(self, gamma, lambda_, advantages):
    settings = dict(gamma=gamma, lambda_=lambda_)
    arrays = _REWARDS, _VALUES, _VALID
    np.testing.assert_allclose(_gae(*arrays, **settings), advantages, atol=1e-6)
    np.testing.assert_allclose(
      _lambda_returns(*arrays, **settings),
      _VALUES + advantages,
      atol=1e-6,
    )


class TestAgainstReference:
  # One token, less than a block, exactly one block, a block and a remainder.
  @pytest.mark.parametrize("length", [1, 5, 128, 150])
  @pytest.mark.parametrize("function, slow", _BOTH)
  def test_ragged_batches(self, length, function, slow):
    rewards, values, mask, bootstrap = _batch(length)
    settings = dict(gamma=0.97, lambda_=0.9)
    for boundary in (None, bootstrap):
      actual = function(
        rewards, values, mask, bootstrap_value=boundary, **settings
      )
      expected = slow(rewards, values, mask, 0.97, 0.9, boundary)
      assert actual.dtype == jnp.float32
      np.testing.assert_allclose(actual, expected, atol=2e-5)
      np.testing.assert_array_equal(actual[~mask], 0.0)

  @pytest.mark.parametrize("function, slow", _BOTH)
  def test_lambda_per_row_and_per_token(self, function, slow):
    rewards, values, mask, bootstrap = _batch(70, seed=1)
    rng = np.random.default_rng(2)
    per_row = rng.random(6).astype(np.float32)
    per_token = rng.random((6, 70)).astype(np.float32)
    for given, wide in [
      (per_row, per_row[:, None]),
      (per_row[:, None], per_row[:, None]),
      (per_token, per_token),
    ]:
      actual = function(
        rewards,
        values,
        mask,
        gamma=1.0,
        lambda_=given,
        bootstrap_value=bootstrap,
      )
      expected = slow(rewards, values, mask, 1.0, wide, bootstrap)
      np.testing.assert_allclose(actual, expected, atol=2e-5)


class TestTransformations:
  settings = dict(gamma=0.99, lambda_=0.9)

  def test_jit_and_leading_axes_and_vmap_agree(self):
    rewards, values, mask, bootstrap = _batch(70, seed=4)
    function = lambda r, v, m, b: estimators.gae(
      r, v, m, bootstrap_value=b, **self.settings
    )
    plain = function(rewards, values, mask, bootstrap)
    jitted = jax.jit(function)(rewards, values, mask, bootstrap)
    mapped = jax.vmap(function)(rewards, values, mask, bootstrap)
    split = function(
      *(x.reshape(2, 3, 70) for x in (rewards, values, mask)),
      bootstrap.reshape(2, 3),
    )
    np.testing.assert_allclose(jitted, plain, atol=1e-6)
    np.testing.assert_allclose(mapped, plain, atol=1e-6)
    np.testing.assert_allclose(split.reshape(6, 70), plain, atol=1e-6)

  def test_nan_in_padding_reaches_neither_value_nor_gradient(self):
    rewards, values, mask, bootstrap = _batch(70, seed=5)
    total = lambda r, v: jnp.sum(
      estimators.gae(r, v, mask, bootstrap_value=bootstrap, **self.settings)
      ** 2
    )
    grad = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    dirty = grad(rewards, values)
    clean = grad(np.nan_to_num(rewards), np.nan_to_num(values))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    for gradient in dirty[1]:
      np.testing.assert_array_equal(gradient[~mask], 0.0)


class TestLimits:
  def test_an_outcome_reward_is_the_target_of_every_token(self):
    mask = np.arange(200) < np.array([[200], [3], [0]])
    last = mask & ~np.append(mask[:, 1:], np.zeros((3, 1), bool), axis=1)
    values = np.random.default_rng(0).normal(size=mask.shape)
    returns = _lambda_returns(
      np.where(last, -1.0, 0.0), values, mask, gamma=1.0, lambda_=1.0
    )
    np.testing.assert_array_equal(returns, np.where(mask, -1.0, 0.0))
