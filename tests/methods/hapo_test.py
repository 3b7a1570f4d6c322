"""HAPO: its parts combined in the loss and in the sampler."""

import functools

import chex
import jax
import numpy as np
import reference
from helpers.tiny_algorithm import (
  make_algorithm,
  make_experience,
  make_rollout,
  noise,
)

from jaxrl_llm import estimators
from jaxrl_llm.sampling.processors import Distribution


class TestHapo:
  """Tests of its parts combined in the loss and in the sampler."""

  def inputs(self, seed=0):
    rng = np.random.default_rng(seed)
    old, advantages, moved = rng.normal(size=(3, 4, 40)).astype(np.float32)
    code = rng.uniform(-1, 1, (4, 40)).astype(np.float32)
    return old + 0.3 * moved, old, advantages, code

  def outputs(self, logprobs, old, advantages, code, use=("hapo",)):
    made = make_algorithm(
      method__use=use, loss__clip_high=0.2, loss__dual_clip=3.0
    )
    inputs = {
      "proximal_logprobs": old,
      "advantages": advantages,
      "entropy_code": code,
    }

    def total(x):
      out = made.policy_loss(inputs | {"logprobs": x})
      return out.loss.sum(), out

    return jax.jit(jax.grad(total, has_aux=True))(logprobs)

  def test_equals_reference(self):
    arrays = self.inputs()
    gradient, out = self.outputs(*arrays)
    slow = functools.partial(reference.hapo_loss, low=0.2, high=0.2, dual=3.0)
    expected = np.vectorize(slow)(*(x.astype(np.float64) for x in arrays))
    np.testing.assert_allclose(out.loss, expected, rtol=2e-5, atol=1e-6)
    # The ratio's effect on the advantage is not differentiated.
    free = ~np.asarray(out.clipped_high | out.clipped_low | out.dual_clipped)
    np.testing.assert_allclose(
      gradient, np.where(free, out.loss, 0.0), rtol=1e-5, atol=1e-6
    )
    assert free.any() and not free.all()

  def test_a_code_of_zero_is_the_clipped_loss(self):
    logprobs, old, advantages, code = self.inputs(1)
    arrays = logprobs, old, advantages, np.zeros_like(code)
    plain = self.outputs(*arrays, use=())
    chex.assert_trees_all_equal(self.outputs(*arrays), plain)
    changed = self.outputs(logprobs, old, advantages, code)
    assert not np.array_equal(changed[0], plain[0])

  def test_the_code_is_of_the_tokens_of_the_loss(self):
    rollout = make_rollout()
    made = make_algorithm(method__use=("hapo",))
    got = make_experience(made)
    expected = reference.entropy_code(np.abs(noise(4)), rollout.mask, 0.8)
    np.testing.assert_allclose(got["entropy_code"], expected, atol=2e-5)
    released = make_algorithm(
      method__use=("hapo",), method__hapo__sign="released"
    )
    np.testing.assert_allclose(
      make_experience(released)["entropy_code"],
      np.abs(expected),
      atol=2e-5,
    )

  def make_temperature(self, tau):
    made = make_algorithm(method__use=("hapo",), method__hapo__tau=tau)
    processors = made.processors
    if not processors:
      return None

    @jax.jit
    def temperature(logits, temperature, statistics):
      given = Distribution(logits, temperature, *[None] * 3)
      changed = processors["entropy_tau"].fn(given, None, statistics)
      return changed.temperature

    return temperature

  def test_the_temperature_follows_the_batch_before(self):
    rng = np.random.default_rng(2)
    logits = 3.0 * rng.normal(size=(6, 19)).astype(np.float32)
    temperature = np.linspace(0.6, 1.4, 6, dtype=np.float32)
    before = np.abs(noise(14))
    made = make_algorithm(method__use=("hapo",), method__hapo__tau=0.05)
    scored = {  # Half of the tokens are not trained on.
      "entropies": np.stack([before, 9.0 + before]),
      "policy_mask": np.stack([before >= 0, before < 0]),
    }
    statistics = made.processors["entropy_tau"].state(scored)
    actual = self.make_temperature(0.05)(logits, temperature, statistics)
    # By hand, in float64.
    logs = np.sort(np.log(before.astype(np.float64)), axis=None)
    pivot = logs[int(np.ceil(0.8 * logs.size)) - 1]
    for i in range(6):
      scaled = logits[i].astype(np.float64) / temperature[i]
      law = np.exp(scaled - scaled.max())
      law /= law.sum()
      above = np.log(-np.sum(law * np.log(law))) - pivot
      code = above / abs((logs[-1] if above > 0 else logs[0]) - pivot)
      expected = temperature[i] * (1 + 0.05 * np.clip(code, -1, 1))
      np.testing.assert_allclose(actual[i], expected, rtol=1e-5)
    assert np.ptp(np.asarray(actual) / temperature) > 0.01

  def test_without_a_batch_before_it_stays_in_every_bit(self):
    logits = np.random.default_rng(3).normal(size=(6, 19)).astype(np.float32)
    temperature = np.linspace(0.6, 1.4, 6, dtype=np.float32)
    none = estimators.EntropyStatistics(*[np.float32(0.0)] * 4)
    actual = self.make_temperature(0.05)(logits, temperature, none)
    np.testing.assert_array_equal(actual, temperature)

  def test_without_tau_there_is_none(self):
    assert self.make_temperature(0.0) is None
