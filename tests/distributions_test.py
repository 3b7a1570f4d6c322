"""Tests of log-probabilities and entropies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import distributions


def _logits(shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 3


class TestLogprobsFromLogits:
  def test_golden(self):
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]])) + 7.0
    logprobs = distributions.logprobs_from_logits(logits, jnp.array([1, 1]))
    np.testing.assert_allclose(logprobs, np.log([0.3, 0.5]), rtol=1e-6)

  @pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
  def test_equals_float64_for_any_leading_axes(self, shape):
    logits = _logits(shape)
    tokens = np.random.default_rng(1).integers(0, 5, shape[:-1], np.int32)
    wide = logits.astype(np.float64)
    law = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    expected = np.take_along_axis(law, tokens[..., None], -1)[..., 0]
    actual = distributions.logprobs_from_logits(logits, tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-5)

  def test_casts_bfloat16_before_it_computes(self):
    logits = jnp.asarray(_logits((4, 100)), jnp.bfloat16)
    tokens = jnp.arange(4)
    exact = distributions.logprobs_from_logits(
      logits.astype(jnp.float32), tokens
    )
    actual = distributions.logprobs_from_logits(logits, tokens)
    assert actual.dtype == jnp.float32
    np.testing.assert_array_equal(actual, exact)

  def test_large_and_forbidden_logits_stay_finite(self):
    logits = jnp.array([[1e4, -1e4, -jnp.inf]])
    logprobs = distributions.logprobs_from_logits(logits, jnp.array([0]))
    np.testing.assert_array_equal(logprobs, [0.0])

  def test_gradient_is_onehot_minus_probabilities(self):
    logits = jnp.asarray(_logits((5,)))
    grad = jax.grad(distributions.logprobs_from_logits)(logits, jnp.array(2))
    expected = jax.nn.one_hot(2, 5) - jax.nn.softmax(logits)
    np.testing.assert_allclose(grad, expected, atol=1e-6)

  def test_bad_shapes_and_types_raise(self):
    logits = jnp.zeros((2, 3))
    for bad in (jnp.zeros(3, int), jnp.zeros((2, 1), int), jnp.zeros(2)):
      with pytest.raises(AssertionError):
        distributions.logprobs_from_logits(logits, bad)
    with pytest.raises(AssertionError):
      distributions.logprobs_from_logits(jnp.zeros((2, 3), int), jnp.array([0]))


class TestEntropyFromLogits:
  def test_golden(self):
    law = np.array([[0.25] * 4, [0.5, 0.3, 0.2, 0.0], [0.0, 1.0, 0.0, 0.0]])
    with np.errstate(divide="ignore"):
      logits = np.log(law).astype(np.float32) - 3.0
    expected = [
      np.log(4),
      -(0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2)),
      0.0,
    ]
    entropy = distributions.entropy_from_logits(logits)
    np.testing.assert_allclose(entropy, expected, atol=1e-6)

  def test_gradient_equals_closed_form_also_beside_forbidden_tokens(self):
    """∂H/∂z_v = -π_v (log π_v + H)."""
    logits = jnp.array([0.3, -1.2, 2.0, -jnp.inf])
    law = jax.nn.softmax(logits)
    entropy, grad = jax.value_and_grad(distributions.entropy_from_logits)(
      logits
    )
    logs = jnp.where(law > 0, jnp.log(jnp.where(law > 0, law, 1.0)), 0.0)
    np.testing.assert_allclose(grad, -law * (logs + entropy), atol=1e-6)


class TestClampedLogRatio:
  def test_clamps_the_value_and_stops_the_gradient_there(self):
    logprobs = jnp.array([-1.0, 0.0, -50.0])
    other = jnp.array([-1.5, -50.0, 0.0])
    ratio = lambda x: distributions.clamped_log_ratio(x, other)
    np.testing.assert_allclose(ratio(logprobs), [0.5, 20.0, -20.0])
    grad = jax.grad(lambda x: jnp.sum(ratio(x)))(logprobs)
    np.testing.assert_array_equal(grad, [1.0, 0.0, 0.0])

  def test_shapes_must_agree(self):
    with pytest.raises(ValueError):
      distributions.clamped_log_ratio(jnp.zeros((2, 3)), jnp.zeros(3))
