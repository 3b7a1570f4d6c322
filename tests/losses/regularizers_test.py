"""Tests of likelihood and KL terms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import losses

_LAW = np.array([0.5, 0.3, 0.2])
_REFERENCE = np.array([0.2, 0.5, 0.3])


def _expected(estimate):
  """Computes E_π[k], and E_π[∇k] w.r.t. logits of π, by sums over tokens."""
  reference = jnp.log(jnp.asarray(_REFERENCE, jnp.float32))
  law = jnp.asarray(_LAW, jnp.float32)

  def mean(logits):
    return jnp.sum(law * estimate(jax.nn.log_softmax(logits), reference))

  return jax.value_and_grad(mean)(jnp.log(law))


class TestKl:
  @pytest.mark.parametrize(
    "estimate, value, gradient",
    [
      (losses.kl_k1, 0.2238047, [0.0, 0.0, 0.0]),
      (losses.kl_k2, 0.2654788, [0.346243, -0.220389, -0.125854]),
      (losses.kl_k3, 0.2238047, [0.3, -0.2, -0.1]),
      (losses.kl_k1_plus, 0.2238047, [0.346243, -0.220389, -0.125854]),
      (losses.kl_k3_plus, 0.2238047, [0.346243, -0.220389, -0.125854]),
    ],
  )
  def test_expectations_of_value_and_gradient(self, estimate, value, gradient):
    actual, slope = _expected(estimate)
    assert float(actual) == pytest.approx(value, abs=1e-6)
    np.testing.assert_allclose(slope, gradient, atol=1e-6)

  def test_k3_is_never_negative_exact_when_small_and_finite_when_large(self):
    small = losses.kl_k3(jnp.array([1e-4, -1e-4, 0.0]), jnp.zeros(3))
    np.testing.assert_allclose(small, [5e-9, 5e-9, 0.0], rtol=2e-2)
    wide = jnp.linspace(-300.0, 300.0, 101)
    estimate = losses.kl_k3(wide, jnp.zeros(101))
    assert (estimate >= 0).all()
    assert np.isfinite(estimate).all()
