"""Tests of the categorical critic's head and loss."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.methods.hl_gauss import CategoricalHead, categorical_value_loss


class TestCategoricalValueLoss:
  def test_golden(self):
    # Bins [-3, -1], [-1, 1], [1, 3] and standard deviation 2: 0.3829 is in the
    # middle bin, and 0.2417 in each of the others.
    target = np.array([0.2417303, 0.3829249, 0.2417303])
    target /= target.sum()
    logits = jnp.log(jnp.array([0.5, 0.25, 0.25]))
    loss, gradient = jax.value_and_grad(
      lambda z: (
        categorical_value_loss(
          z, jnp.array(0.0), low=-3.0, high=3.0, sigma=1.0
        ).loss
      )
    )(logits)
    expected = target @ [math.log(2), math.log(4), math.log(4)]
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    softmax = np.array([0.5, 0.25, 0.25])
    np.testing.assert_allclose(gradient, softmax - target, atol=1e-6)

  def test_its_minimum_has_the_return_as_its_value(self):
    head = CategoricalHead(51, (-2.0, 2.0))
    returns = jnp.linspace(-1.5, 1.5, 7)
    loss = lambda z: categorical_value_loss(
      z, returns, low=-2.0, high=2.0
    ).loss.sum()
    # The gradient at zero logits is 1 / K - p.
    target = 1 / 51 - jax.grad(loss)(jnp.zeros((7, 51)))
    read = head.read(jnp.log(jnp.maximum(target, 1e-12)))
    np.testing.assert_allclose(read["values"], returns, atol=1e-3)
    np.testing.assert_allclose(
      head.read(jnp.zeros((7, 51)))["values"], np.zeros(7), atol=1e-6
    )

  def test_returns_beyond_the_bins_are_at_their_end(self):
    logits, settings = jnp.arange(5.0)[None], {"low": -1.0, "high": 1.0}
    found = [
      categorical_value_loss(logits, jnp.array([g]), **settings).loss
      for g in (1.0, 30.0, -1.0, -30.0)
    ]
    assert found[0] == found[1] and found[2] == found[3] != found[0]
