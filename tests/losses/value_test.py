"""Tests of the critic's losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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

  def test_flags_where_the_bound_counts(self):
    rng = np.random.default_rng(0)
    values, returns, old = rng.normal(size=(3, 4, 30)).astype(np.float32)
    result = losses.clipped_value_loss(
      values, returns, old_values=old, clip_value=0.3
    )
    plain = losses.clipped_value_loss(values, returns)
    assert not plain.clipped.any()
    assert result.clipped.any()
    np.testing.assert_array_equal(
      result.loss > plain.loss, np.asarray(result.clipped)
    )
