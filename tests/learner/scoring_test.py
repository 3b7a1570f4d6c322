"""Scores of packed samples equal those of the plain model."""

import functools

import jax
import numpy as np
from helpers.tiny_update import (
  CAPACITY,
  TEMPERATURE,
  make_data,
  make_fns,
  make_params,
  plain_logprobs,
  plain_values,
)

from jaxrl_llm.learner import packing, scoring


class TestScore:
  def test_equals_the_plain_model(self):
    rollout, _ = make_data()
    packed, layout = packing.pack(
      rollout, capacity=CAPACITY, rows=4, micro_batches=4
    )
    logprobs, entropy = map(
      np.asarray, jax.jit(plain_logprobs)(make_params("policy"))
    )
    scored = jax.jit(
      functools.partial(scoring.score_logprobs, fns=make_fns("policy"))
    )(make_params("policy"), packed.replace(temperature=TEMPERATURE))
    mask = rollout.mask
    np.testing.assert_allclose(
      layout.gather(scored.logprobs)[mask], logprobs[mask], atol=1e-5
    )
    assert np.ptp(entropy[mask]) > 0.05
    np.testing.assert_allclose(
      layout.gather(scored.entropy)[mask], entropy[mask], atol=1e-5
    )

    expected = np.asarray(jax.jit(plain_values)(make_params("value")))
    scored = jax.jit(
      functools.partial(scoring.score_values, fns=make_fns("value"))
    )(make_params("value"), packed)
    assert scored.keys() == {"values"}
    np.testing.assert_allclose(
      layout.gather(scored["values"])[layout.present],
      expected[layout.present],
      atol=1e-5,
    )
