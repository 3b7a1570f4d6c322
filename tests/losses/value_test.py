"""Tests of the critic's loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxrl_llm import losses


class TestClippedValueLoss:
  @pytest.mark.parametrize(
    "value, target, expected, slope",
    [(1.0, 0.2, 0.32, 0.8), (0.0, 0.6, 0.18, -0.6), (1.0, 0.9, 0.02, 0.0)],
  )
  def test_golden(self, value, target, expected, slope):
    result, gradient = jax.value_and_grad(
      lambda v: (
        losses.clipped_value_loss(
          v, jnp.array(target), old_values=jnp.array(0.5), clip_value=0.2
        ).loss
      )
    )(jnp.array(value))
    assert float(result) == pytest.approx(expected, abs=1e-6)
    assert float(gradient) == pytest.approx(slope, abs=1e-6)

  def test_equals_reference_plain_jitted_and_mapped(self):
    rng = np.random.default_rng(0)
    values, returns, old = rng.normal(size=(3, 4, 30)).astype(np.float32)
    function = lambda v, g, o: losses.clipped_value_loss(
      v, g, old_values=o, clip_value=0.3
    )
    expected = np.vectorize(lambda v, g, o: reference.value_loss(v, g, o, 0.3))(
      values, returns, old
    )
    for call in (function, jax.jit(function), jax.vmap(function)):
      result = call(values, returns, old)
      np.testing.assert_allclose(result.loss, expected, rtol=1e-5, atol=1e-6)
    plain = losses.clipped_value_loss(values, returns)
    np.testing.assert_allclose(
      plain.loss, 0.5 * (values - returns) ** 2, rtol=1e-5
    )
    assert not plain.clipped.any()
    assert result.clipped.any()
    np.testing.assert_array_equal(
      result.loss > plain.loss, np.asarray(result.clipped)
    )

  def test_bad_input_raises(self):
    ones = jnp.ones(2)
    with pytest.raises(ValueError, match="only old_values was given"):
      losses.clipped_value_loss(ones, ones, old_values=ones)
    with pytest.raises(ValueError, match="only clip_value was given"):
      losses.clipped_value_loss(ones, ones, clip_value=0.2)
    with pytest.raises(ValueError, match="clip_value=-0.2"):
      losses.clipped_value_loss(ones, ones, old_values=ones, clip_value=-0.2)
    with pytest.raises(ValueError):
      losses.clipped_value_loss(ones, jnp.ones((2, 1)))
    with pytest.raises(ValueError):
      losses.clipped_value_loss(
        ones, ones, old_values=jnp.ones(1), clip_value=0.2
      )
