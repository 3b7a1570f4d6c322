"""Tests of GSPO's surrogate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from helpers import ragged

from jaxrl_llm import losses, masked

_CLIP = dict(clip_low=0.2, clip_high=0.28)


class TestGolden:
  @pytest.mark.parametrize(
    "advantage, expected", [(1.0, -1.0004), (-1.0, 1.0725082)]
  )
  def test_one_response(self, advantage, expected):
    result = losses.gspo_loss(
      np.array([0.1, -0.05, 0.2, 0.03]),
      np.zeros(4),
      np.full(4, advantage),
      np.ones(4, bool),
      clip_low=3e-4,
      clip_high=4e-4,
    )
    np.testing.assert_allclose(result.ratio, 1.0725082, rtol=1e-6)
    np.testing.assert_allclose(result.loss, expected, rtol=1e-6)
    np.testing.assert_array_equal(result.clipped_high, advantage > 0)
    assert not result.clipped_low.any()


class TestGspo:
  def test_ragged_batches_equal_reference(self):
    logprobs, old, advantages, mask = ragged.batch(0, 1.0, length=24)
    function = lambda *x: losses.gspo_loss(*x, **_CLIP)
    rows = np.broadcast_to(np.arange(6)[:, None], mask.shape)
    ratio = reference.gspo_ratio(logprobs, old, mask, rows)
    expected = np.vectorize(
      lambda s, a: reference.policy_loss(np.log(s), 0.0, a, 0.2, 0.28)
    )(ratio, np.nan_to_num(advantages))
    plain = function(logprobs, old, advantages, mask)
    split = [x.reshape(2, 3, 24) for x in (logprobs, old, advantages, mask)]
    jitted = jax.jit(function)(logprobs, old, advantages, mask)
    mapped = jax.jit(jax.vmap(function))(logprobs, old, advantages, mask)
    leading = jax.tree.map(
      lambda x: np.asarray(x).reshape(6, 24), jax.jit(function)(*split)
    )
    for result in (plain, leading, jitted, mapped):
      assert result.loss.dtype == jnp.float32
      np.testing.assert_allclose(
        result.loss, np.where(mask, expected, 0.0), rtol=2e-5, atol=1e-6
      )
      np.testing.assert_allclose(
        np.where(mask, result.ratio, 1.0), ratio, rtol=2e-5
      )

  def test_gradient_is_that_of_the_sequence_and_zero_where_clipped(self):
    """Value and gradient equal GSPO's original form, one loss per response."""
    logprobs, old, _, mask = ragged.batch(1, 0.5, length=24)
    advantages = np.array([1.0, 1.0, -1.0, -2.0, 0.5, -0.3], np.float32)
    weights = masked.token_weights(mask, mode="seq-mean-token-mean")

    def by_token(logprobs):
      spread = jnp.broadcast_to(advantages[:, None], mask.shape)
      return jnp.sum(
        weights * losses.gspo_loss(logprobs, old, spread, mask, **_CLIP).loss
      )

    def by_sequence(logprobs):
      ratio = masked.masked_mean(logprobs - jnp.asarray(old), mask, axis=1)
      loss = losses.clipped_policy_loss(
        ratio, jnp.zeros(6), advantages, **_CLIP
      ).loss
      return masked.masked_mean(loss, mask.any(1))

    logprobs = np.where(mask, logprobs, 0.0)
    old = np.where(mask, old, 0.0)
    expected = jax.jit(jax.value_and_grad(by_sequence))(logprobs)
    actual = jax.jit(jax.value_and_grad(by_token))(logprobs)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(actual[1], expected[1], atol=1e-6)
    moving = np.any(np.asarray(actual[1]) != 0.0, axis=1)
    assert moving.any() and not moving[mask.any(1)].all()

  def test_far_apart_policies_stay_finite_and_unmoved(self):
    result, pullback = jax.vjp(
      lambda x: (
        losses.gspo_loss(
          x, jnp.zeros((2, 3)), -jnp.ones((2, 3)), jnp.ones((2, 3)), **_CLIP
        ).loss
      ),
      jnp.array([[50.0] * 3, [-50.0] * 3]),
    )
    np.testing.assert_allclose(result[0], np.exp(10.0), rtol=1e-5)
    np.testing.assert_array_equal(pullback(jnp.ones((2, 3)))[0], 0.0)

  def test_nan_in_padding_reaches_neither_value_nor_gradient(self):
    arrays = ragged.batch(4, 1.0, length=24)

    def total(logprobs, old, advantages):
      result = losses.gspo_loss(logprobs, old, advantages, arrays[3], **_CLIP)
      return jnp.sum(result.loss)

    gradient = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))
    dirty = gradient(*arrays[:3])
    clean = gradient(*map(np.nan_to_num, arrays[:3]))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert np.isfinite(dirty[0])


class TestSegments:
  def test_packed_rows_equal_reference(self):
    """Segments have any id, are not contiguous, and some have no token."""
    logprobs, old, advantages, mask = ragged.batch(0, 1.0, length=24)
    segments = np.random.default_rng(0).integers(0, 5, mask.shape)
    segments[0] = 24
    result = jax.jit(functools.partial(losses.gspo_loss, **_CLIP))(
      logprobs, old, advantages, mask, segments=segments
    )
    ratio = reference.gspo_ratio(logprobs, old, mask, segments)
    np.testing.assert_allclose(
      np.where(mask, result.ratio, 1.0), ratio, rtol=2e-5
    )
