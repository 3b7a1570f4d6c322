"""Tests of extended GAE and what belongs to a cut response."""

import functools

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
_gae = jax.jit(estimators.gae)


def _batch(length=70, rows=8, seed=0):
  """Ragged rows with holes, an empty and a one-token row, both cut; NaN."""
  rng = np.random.default_rng(seed)
  mask = np.arange(length) < rng.integers(1, length + 1, rows)[:, None]
  mask &= rng.random((rows, length)) < 0.8
  mask[0] = True
  mask[1] = False
  mask[2] = np.arange(length) == length // 2
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
    """The second window ends with R = -1; the first one is context then."""
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
  @pytest.mark.parametrize("boundary", ["repeat", "bootstrap"])
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
      next_values if boundary == "bootstrap" else None,
    )
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    np.testing.assert_array_equal(actual[~mask], 0.0)

  @pytest.mark.parametrize("boundary", ["repeat", "bootstrap", "zero"])
  def test_rows_that_ended_equal_gae_in_every_bit(self, boundary):
    rewards, values, mask, truncated, next_values = _batch(seed=1)
    kwargs = dict(boundary=boundary, next_values=next_values, **_SETTINGS)
    # Compilers may round the sums of two programs in different ways.
    with jax.disable_jit():
      plain = _gae(rewards, values, mask, **_SETTINGS)
      mixed = _egae(rewards, values, mask, truncated, **kwargs)
      none = _egae(rewards, values, mask, np.zeros(8, bool), **kwargs)
    np.testing.assert_array_equal(mixed[~truncated], plain[~truncated])
    np.testing.assert_array_equal(none, plain)

  def test_zero_boundary_is_gae_everywhere(self):
    rewards, values, mask, truncated, _ = _batch(seed=2)
    actual = _egae(
      rewards, values, mask, truncated, boundary="zero", **_SETTINGS
    )
    np.testing.assert_array_equal(
      actual, _gae(rewards, values, mask, **_SETTINGS)
    )

  def test_the_last_token_of_a_window_gets_exactly_zero(self):
    _, values, mask, _, _ = _batch(seed=3)
    everywhere = np.ones(8, bool)
    actual = _egae(
      np.zeros_like(values), values, mask, everywhere, gamma=1.0, lambda_=0.95
    )
    for row, kept in zip(actual, mask):
      assert not kept.any() or row[np.flatnonzero(kept)[-1]] == 0.0

  def test_what_follows_the_window_has_no_effect(self):
    """Neither later rewards and values nor a verdict on the unfinished."""
    rewards, values, mask, truncated, _ = _batch(seed=5)
    window = mask & (np.arange(70) < 30)
    call = lambda r, v: _egae(r, v, window, truncated, **_SETTINGS)
    clean = call(rewards, values)
    later = np.arange(70) >= 30
    dirty = call(np.where(later, 1e6, rewards), np.where(later, np.nan, values))
    np.testing.assert_array_equal(clean, dirty)

  def test_jit_and_leading_axes_agree(self):
    arrays = _batch(seed=6)
    call = functools.partial(estimators.egae, boundary="bootstrap", **_SETTINGS)
    function = lambda *x: call(*x[:4], next_values=x[4])
    plain = function(*arrays)
    np.testing.assert_allclose(jax.jit(function)(*arrays), plain, atol=1e-6)
    mapped = jax.vmap(function)(*arrays)
    np.testing.assert_allclose(mapped, plain, atol=1e-6)
    split = function(*(x.reshape(2, 4, *x.shape[1:]) for x in arrays))
    np.testing.assert_allclose(split.reshape(8, 70), plain, atol=1e-6)

  def test_nan_in_padding_reaches_neither_value_nor_gradient(self):
    rewards, values, mask, truncated, next_values = _batch(seed=7)

    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def total(rewards, values, next_values):
      repeated = _egae(rewards, values, mask, truncated, **_SETTINGS)
      known = _egae(
        rewards,
        values,
        mask,
        truncated,
        boundary="bootstrap",
        next_values=next_values,
        **_SETTINGS,
      )
      return jnp.sum(jnp.square(repeated) + jnp.square(known))

    dirty = total(rewards, values, next_values)
    clean = total(*map(np.nan_to_num, (rewards, values, next_values)))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert np.isfinite(dirty[0])


class TestChunkIdentity:
  """A response seen in two windows against the same one seen whole."""

  cut = 37
  values = np.random.default_rng(8).normal(size=70).astype(np.float32)
  rewards = np.where(np.arange(70) == 69, -1.0, 0.0).astype(np.float32)

  def _first_window(self, **kwargs):
    return _egae(
      self.rewards,
      self.values,
      np.arange(70) < self.cut,
      np.array(True),
      next_values=self.values[self.cut],
      **kwargs,
    )[: self.cut]

  def test_bootstrap_joins_exactly(self):
    """A_full(t) = A_window(t) + (γλ)^(l-t) A_full(l)."""
    full = _gae(self.rewards, self.values, np.ones(70, bool), **_SETTINGS)
    window = self._first_window(boundary="bootstrap", **_SETTINGS)
    decay = (0.97 * 0.9) ** (self.cut - np.arange(self.cut))
    np.testing.assert_allclose(
      full[: self.cut], window + decay * full[self.cut], atol=1e-5
    )

  def test_repeat_errs_by_the_step_of_the_values(self):
    """By (γλ)^(l-1-t) γ (V(s_l) - V(s_{l-1}))."""
    known = self._first_window(boundary="bootstrap", **_SETTINGS)
    repeated = self._first_window(boundary="repeat", **_SETTINGS)
    step = self.values[self.cut] - self.values[self.cut - 1]
    decay = (0.97 * 0.9) ** (self.cut - 1 - np.arange(self.cut))
    np.testing.assert_allclose(known - repeated, decay * 0.97 * step, atol=1e-5)
    error = estimators.boundary_error(
      self.values,
      np.arange(70) < self.cut,
      np.array(True),
      self.values[self.cut],
    )
    assert float(error) == pytest.approx(abs(step), rel=1e-6)


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

  def test_one_token_carried_no_gradient_anyway(self):
    rewards, values, mask, truncated, _ = _batch(seed=12)
    rewards = np.zeros_like(rewards)
    advantages = _egae(
      rewards, values, mask, truncated, gamma=1.0, lambda_=0.95
    )
    kept = estimators.drop_tail(mask, truncated, tokens=1)
    np.testing.assert_array_equal(advantages * kept, advantages)


class TestBadInput:
  arrays = np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 3), bool)
  truncated = np.ones(2, bool)

  def test_settings(self):
    call = functools.partial(
      estimators.egae, *self.arrays, self.truncated, **_SETTINGS
    )
    with pytest.raises(ValueError, match="boundary='last', expected one of"):
      call(boundary="last")
    with pytest.raises(ValueError, match="'bootstrap' needs next_values"):
      call(boundary="bootstrap")
    with pytest.raises(ValueError, match=r"gamma=1.5, expected"):
      estimators.egae(*self.arrays, self.truncated, gamma=1.5, lambda_=1.0)
    with pytest.raises(ValueError, match="tokens=-1"):
      estimators.drop_tail(self.arrays[2], self.truncated, tokens=-1)

  def test_shapes(self):
    call = functools.partial(estimators.egae, *self.arrays, **_SETTINGS)
    with pytest.raises(ValueError):
      call(np.ones(3, bool))
    with pytest.raises(ValueError):
      call(self.truncated, next_values=np.ones(3))
    with pytest.raises(ValueError):
      estimators.drop_tail(self.arrays[2], np.ones(3, bool), tokens=1)
    with pytest.raises(ValueError):
      estimators.boundary_error(
        *self.arrays[1:], self.truncated, np.ones((2, 1))
      )
