"""Every per-token loss on ragged batches equals a loop over tokens.

Losses are used as in the learner: masked entries filled, weighted and summed.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from helpers import ragged

from jaxrl_llm import losses, masked
from jaxrl_llm.methods.hl_gauss import categorical_value_loss

_CLIP = dict(clip_low=0.2, clip_high=0.28)

# name: (loss of arrays, loss of one token); arguments are log π, log π_old,
# log π_behav, and a number z of any sign: an advantage or a target.
_LOSSES = {
  "clip": (
    lambda x, o, b, z: (
      losses.clipped_policy_loss(x, o, z, dual_clip=1.5, **_CLIP).loss
    ),
    lambda x, o, b, z: reference.policy_loss(x, o, z, 0.2, 0.28, 1.5),
  ),
  "cispo": (
    lambda x, o, b, z: (
      losses.cispo_loss(x, o, z, clip_low=0.3, clip_high=0.28).loss
    ),
    lambda x, o, b, z: -min(max(math.exp(x - o), 0.7), 1.28) * z * x,
  ),
  "policy gradient": (
    lambda x, o, b, z: losses.policy_gradient_loss(x, o, z).loss,
    lambda x, o, b, z: -z * x,
  ),
  "decoupled": (
    lambda x, o, b, z: (
      losses.decoupled_policy_loss(
        x, o, b, z, dual_clip=1.5, cap=1.2, **_CLIP
      ).loss
    ),
    lambda x, o, b, z: reference.decoupled_loss(
      x, o, b, z, 0.2, 0.28, 1.5, 1.2
    ),
  ),
  "k1": (lambda x, o, b, z: losses.kl_k1(x, o), lambda x, o, b, z: x - o),
  "k2": (
    lambda x, o, b, z: losses.kl_k2(x, o),
    lambda x, o, b, z: (x - o) ** 2 / 2,
  ),
  "k3": (
    lambda x, o, b, z: losses.kl_k3(x, o),
    lambda x, o, b, z: math.exp(o - x) - 1 + x - o,
  ),
  "k1+": (lambda x, o, b, z: losses.kl_k1_plus(x, o), lambda x, o, b, z: x - o),
  "k3+": (
    lambda x, o, b, z: losses.kl_k3_plus(x, o),
    lambda x, o, b, z: math.exp(o - x) - 1 + x - o,
  ),
  "nll": (lambda x, o, b, z: losses.nll(x), lambda x, o, b, z: -x),
  "entropy": (
    lambda x, o, b, z: losses.entropy_bonus(x),
    lambda x, o, b, z: -x,
  ),
  "value": (
    lambda x, o, b, z: losses.clipped_value_loss(x, z).loss,
    lambda x, o, b, z: reference.value_loss(x, z),
  ),
  "clipped value": (
    lambda x, o, b, z: (
      losses.clipped_value_loss(x, z, old_values=o, clip_value=0.3).loss
    ),
    lambda x, o, b, z: reference.value_loss(x, z, o, 0.3),
  ),
  "categorical value": (
    lambda x, o, b, z: (
      categorical_value_loss(
        jnp.stack([x, 0 * x, -x], axis=-1), z, low=-2.0, high=1.0
      ).loss
    ),
    lambda x, o, b, z: reference.categorical_value_loss(
      [x, 0, -x], z, -2.0, 1.0, 0.75
    ),
  ),
}
# Gradients of one token that are not derivatives of the value.
_SLOPES = {
  "cispo": lambda x, o, b, z: -min(max(math.exp(x - o), 0.7), 1.28) * z,
  "k1+": lambda x, o, b, z: x - o,
  "k3+": lambda x, o, b, z: x - o,
}


@functools.cache
def _program(name):
  """Returns (arrays, weights, mask) -> sum and gradient of the first array."""

  @jax.jit
  @jax.value_and_grad
  def total(logprobs, others, weights, mask):
    filled = [masked.masked_fill(x, mask) for x in (logprobs, *others)]
    return jnp.sum(weights * _LOSSES[name][0](*filled))

  return total


def _reduced(name, arrays, mask):
  weights = masked.token_weights(mask, mode="token-mean")
  return _program(name)(arrays[0], arrays[1:], weights, mask)


def _by_token(slow, arrays, mask):
  """Computes slow(...) of each unmasked token, [B, T]; others are 0."""
  result = np.zeros(mask.shape)
  for i, t in np.argwhere(mask):
    result[i, t] = slow(*(float(x[i, t]) for x in arrays))
  return result


def _slope(name):
  """Returns the derivative of a token's slow loss by log π or V."""
  slow, h = _LOSSES[name][1], 1e-6
  central = lambda x, *rest: (slow(x + h, *rest) - slow(x - h, *rest)) / (2 * h)
  return _SLOPES.get(name, central)


@pytest.mark.parametrize("name", _LOSSES)
class TestRagged:
  def test_value_and_gradient_equal_those_of_the_reference(self, name):
    *arrays, mask = ragged.batch(3, 0.3, 0.5)
    loss, gradient = _reduced(name, arrays, mask)
    expected = _by_token(_LOSSES[name][1], arrays, mask).sum() / mask.sum()
    np.testing.assert_allclose(loss, expected, rtol=2e-5, atol=1e-6)
    expected = _by_token(_slope(name), arrays, mask) / mask.sum()
    np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(gradient[~mask], 0.0)

  def test_wider_padding_and_empty_rows_change_nothing(self, name):
    *arrays, mask = ragged.batch(4, 0.3, 0.5)
    room = ((0, 2), (0, 9))
    wide = [np.pad(x, room, constant_values=np.nan) for x in arrays]
    loss, gradient = _reduced(name, arrays, mask)
    wide_loss, wide_gradient = _reduced(name, wide, np.pad(mask, room))
    np.testing.assert_allclose(wide_loss, loss, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
      wide_gradient, np.pad(gradient, room), rtol=1e-6, atol=1e-8
    )
