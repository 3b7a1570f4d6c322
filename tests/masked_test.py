"""Tests of the masked and segment reductions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxrl_llm import masked

_NAN = float("nan")


def _holes(seed=0, shape=(5, 7)):
  """Makes random numbers and a mask, with an empty row and NaN if masked."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=shape).astype(np.float32)
  mask = rng.random(shape) < 0.6
  mask[-1] = False
  return np.where(mask, x, np.nan), mask


class TestReductions:
  @pytest.mark.parametrize("axis", [None, 0, 1, (0, 1), -1])
  @pytest.mark.parametrize("keepdims", [False, True])
  def test_equals_numpy_where(self, axis, keepdims):
    x, mask = _holes()
    clean, keep = np.where(mask, x, 0.0), dict(axis=axis, keepdims=keepdims)
    count = mask.sum(**keep)
    mean = clean.sum(**keep) / np.maximum(count, 1)
    full_mean = clean.sum(axis=axis, keepdims=True) / np.maximum(
      mask.sum(axis=axis, keepdims=True), 1
    )
    squares = (np.where(mask, clean - full_mean, 0.0) ** 2).sum(**keep)
    np.testing.assert_allclose(masked.masked_count(mask, **keep), count)
    np.testing.assert_allclose(
      masked.masked_sum(x, mask, **keep), clean.sum(**keep), atol=1e-6
    )
    np.testing.assert_allclose(
      masked.masked_mean(x, mask, **keep), mean, atol=1e-6
    )
    var = squares / np.maximum(count - 1, 1)
    np.testing.assert_allclose(
      masked.masked_var(x, mask, **keep), var, atol=1e-6
    )

  def test_max_takes_the_largest_and_zero_of_nothing(self):
    x = np.array([[-3.0, -1.0, _NAN], [_NAN, 9.0, 1.0]])
    mask = np.array([[True, True, False], [False, False, False]])
    np.testing.assert_array_equal(
      masked.masked_max(x, mask, axis=1), [-1.0, 0.0]
    )

  @pytest.mark.parametrize(
    "function",
    [
      masked.masked_sum,
      masked.masked_mean,
      masked.masked_var,
      masked.masked_max,
      lambda x, m: masked.explained_variance(x, jnp.roll(x, 1), m),
    ],
  )
  def test_nan_in_padding_changes_neither_value_nor_gradient(self, function):
    x, _ = _holes()
    mask = np.zeros(x.shape, bool)
    mask[1:3, 2:6] = True
    x = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    both = jnp.asarray(mask & np.roll(mask, 1))
    clean = jax.value_and_grad(function)(jnp.where(mask, x, 0.0), both)
    dirty = jax.value_and_grad(function)(jnp.where(mask, x, _NAN), both)
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])
    assert np.isfinite(dirty[1]).all()

  def test_integer_masks_count_as_bool(self):
    x = jnp.arange(3.0)
    assert masked.masked_mean(x, jnp.array([0, 1, 1])) == 1.5

  def test_shapes_must_agree(self):
    with pytest.raises(ValueError):
      masked.masked_mean(jnp.ones((2, 3)), jnp.ones(3, bool))


class TestExplainedVariance:
  returns = np.array([1.0, -1.0, 1.0, 0.5, _NAN])
  mask = np.array([True, True, True, True, False])

  def test_perfect_constant_and_opposite_critics(self):
    share = lambda v: float(
      masked.explained_variance(v, self.returns, self.mask)
    )
    assert share(self.returns) == 1.0
    # A constant offset changes nothing: only variances matter.
    assert share(self.returns + 3.0) == pytest.approx(1.0, abs=1e-6)
    assert share(np.full(5, 7.0)) == pytest.approx(0.0, abs=1e-6)
    assert share(-self.returns) == pytest.approx(-3.0, abs=1e-5)

  def test_nothing_to_explain_is_zero(self):
    ones = np.ones(5)
    assert masked.explained_variance(self.returns, ones, self.mask) == 0.0
    empty = np.zeros(5, bool)
    assert masked.explained_variance(ones, self.returns, empty) == 0.0

  @pytest.mark.parametrize("value", [0.1, 1.2, 1.1])
  def test_equal_returns_have_nothing_to_explain_if_their_mean_rounds(
    self, value
  ):
    returns, mask = np.full(100, value, np.float32), np.ones(100, bool)
    values = np.linspace(0, 1, 100, dtype=np.float32)
    assert masked.explained_variance(values, returns, mask) == 0.0


_GOLDEN = [
  ("token-mean", None, -0.125),
  ("seq-mean-token-mean", None, 0.25),
  ("seq-mean-token-sum", None, -0.5),
  ("seq-mean-token-sum-norm", 8, -0.125),
  ("dr-grpo", 8, -0.0625),
]
_MODES = [row[:2] for row in _GOLDEN]


class TestTokenWeights:
  @pytest.mark.parametrize("mode, norm, expected", _GOLDEN)
  def test_golden(self, mode, norm, expected):
    mask = np.arange(6) < np.array([[2], [6]])
    loss = np.where(mask, np.array([[1.0], [-0.5]]), 0.0)
    weights = masked.token_weights(mask, mode=mode, norm=norm)
    assert float(jnp.sum(weights * loss)) == pytest.approx(expected, abs=1e-6)

  @pytest.mark.parametrize("mode, norm", _MODES)
  def test_equals_reference_with_holes_and_empty_rows(self, mode, norm):
    loss, mask = _holes(7, (6, 9))
    weights = masked.token_weights(mask, mode=mode, norm=norm)
    assert weights.dtype == jnp.float32
    assert weights.shape == mask.shape
    np.testing.assert_array_equal(weights[~mask], 0.0)
    total = masked.masked_sum(weights * np.where(mask, loss, 0.0), mask)
    expected = reference.aggregate(loss, mask, mode, norm)
    np.testing.assert_allclose(total, expected, atol=1e-6)

  @pytest.mark.parametrize("mode, norm", _MODES)
  def test_parts_of_a_batch_sum_up_to_it(self, mode, norm):
    loss, mask = _holes(10, (6, 9))
    loss = np.where(mask, loss, 0.0)
    weigh = functools.partial(masked.token_weights, mode=mode, norm=norm)
    total = sum(
      jnp.sum(weigh(mask[rows], size=1) * loss[rows])
      for rows in (np.s_[:1], np.s_[1:4], np.s_[4:])
    )
    whole = jnp.sum(weigh(mask) * loss)
    size = masked.reduction_size(mask, mode=mode)
    np.testing.assert_allclose(total / size, whole, rtol=1e-6)

  @pytest.mark.parametrize("mode, norm", _MODES)
  def test_an_empty_mask_weighs_nothing(self, mode, norm):
    weights = masked.token_weights(np.zeros((2, 3), bool), mode=mode, norm=norm)
    np.testing.assert_array_equal(weights, 0.0)

  def test_leading_axes_together_count_sequences(self):
    _, mask = _holes(9, (6, 4))
    flat = masked.token_weights(mask, mode="seq-mean-token-mean")
    split = masked.token_weights(
      mask.reshape(2, 3, 4), mode="seq-mean-token-mean"
    )
    np.testing.assert_array_equal(split.reshape(6, 4), flat)

  @pytest.mark.parametrize("size", [None, 7.3])
  @pytest.mark.parametrize("mode, norm", _MODES)
  def test_numpy_gives_the_same_bits_without_a_device(self, mode, norm, size):
    _, mask = _holes(11, (37, 53))
    weigh = functools.partial(
      masked.token_weights, mode=mode, norm=norm and norm / 3, size=size
    )
    host = weigh(mask, xp=np)
    assert isinstance(host, np.ndarray) and host.dtype == np.float32
    for device in (weigh(jnp.asarray(mask)), jax.jit(weigh)(mask)):
      assert isinstance(device, jax.Array)
      np.testing.assert_array_equal(host, device)
    sizes = [masked.reduction_size(mask, mode=mode, xp=xp) for xp in (np, jnp)]
    assert isinstance(sizes[0], np.float32) and sizes[0] == sizes[1]

  @pytest.mark.parametrize(
    "settings",
    [
      {"mode": "mean"},
      {"mode": "token-mean", "norm": 8},
      {"mode": "dr-grpo"},
      {"mode": "seq-mean-token-sum-norm", "norm": 0},
    ],
  )
  def test_bad_settings_raise(self, settings):
    with pytest.raises(ValueError, match="expected|required"):
      masked.token_weights(np.ones((1, 2), bool), **settings)


class TestSegments:
  x = np.array([3.0, _NAN, 1.0, 2.0, 8.0, 5.0, _NAN, 4.0], np.float32)
  segments = np.array([0, 4, 2, 0, 2, 0, -1, 5], np.int32)

  def _call(self, function):
    return function(self.x, self.segments, num_segments=4)

  def test_golden(self):
    """Rows outside the segments are ignored, even if they are NaN."""
    count = masked.segment_count(self.segments, num_segments=4)
    np.testing.assert_array_equal(count, [3, 0, 2, 0])
    rows = [[3.0, 2.0, 5.0], [], [1.0, 8.0], []]
    for function, numpy_function in [
      (masked.segment_sum, np.sum),
      (masked.segment_mean, np.mean),
      (masked.segment_min, np.min),
      (masked.segment_median, np.median),
    ]:
      expected = [numpy_function(row) if row else 0.0 for row in rows]
      np.testing.assert_allclose(self._call(function), expected, rtol=1e-6)
    expected = [np.std(row, ddof=1) if row else 0.0 for row in rows]
    np.testing.assert_allclose(
      self._call(masked.segment_std), expected, rtol=1e-6
    )

  @pytest.mark.parametrize(
    "function", [masked.segment_mean, masked.segment_std, masked.segment_median]
  )
  def test_nan_leaves_gradients_alone(self, function):
    def total(x):
      y = function(x, self.segments, num_segments=4)
      return jnp.sum(y * jnp.arange(1.0, 5.0))

    inside = (self.segments >= 0) & (self.segments < 4)
    dirty = jax.grad(total)(jnp.where(inside, self.x, _NAN))
    clean = jax.grad(total)(jnp.where(inside, self.x, 0.0))
    np.testing.assert_array_equal(dirty, clean)
    np.testing.assert_array_equal(dirty[~inside], 0.0)

  def test_std_of_one_or_of_equal_elements_is_zero(self):
    std = lambda x: masked.segment_std(x, jnp.array([0, 1, 1]), num_segments=2)
    x = jnp.array([4.0, 2.0, 2.0])
    np.testing.assert_array_equal(std(x), 0.0)
    np.testing.assert_array_equal(jax.jacobian(std)(x), 0.0)

  def test_bad_input_raises(self):
    with pytest.raises(ValueError, match="num_segments=0"):
      masked.segment_count(np.array([0]), num_segments=0)
    with pytest.raises(ValueError):
      masked.segment_mean(np.ones(3), np.zeros(2, int), num_segments=1)
    with pytest.raises(AssertionError):
      masked.segment_mean(np.ones(2), np.zeros(2), num_segments=1)
