"""Scores of packed samples are those of the plain model."""

import functools

import jax
import numpy as np
from helpers.tiny_update import (
  CAPACITY,
  TEMPERATURE,
  make_data,
  make_fns,
  make_params,
  padded,
)

from jaxrl_llm.learner import packing, scoring
from jaxrl_llm.models import PackedRows


class TestScore:
  def test_equals_the_plain_model(self):
    rollout, _ = make_data()
    packed, layout = packing.pack(
      rollout, capacity=CAPACITY, rows=4, micro_batches=4
    )
    tokens, present, before = padded()
    logits = jax.jit(make_fns("policy").logits)(
      make_params("policy"), tokens, present
    )
    at = np.take_along_axis(
      np.asarray(jax.nn.log_softmax(logits / TEMPERATURE)),
      before[..., None],
      axis=1,
    )
    expected = np.take_along_axis(at, rollout.tokens[..., None], axis=2)[..., 0]
    scored = jax.jit(
      functools.partial(scoring.score_logprobs, fns=make_fns("policy"))
    )(make_params("policy"), packed, TEMPERATURE)
    mask = rollout.mask
    np.testing.assert_allclose(
      layout.gather(scored.logprobs)[mask], expected[mask], atol=1e-5
    )
    entropy = -np.sum(np.exp(at) * at, axis=2)
    assert np.ptp(entropy[mask]) > 0.05
    np.testing.assert_allclose(
      layout.gather(scored.entropy)[mask], entropy[mask], atol=1e-5
    )
    rows = PackedRows(
      tokens=tokens,
      segments=present.astype(np.int32),
      positions=np.maximum(present.cumsum(axis=1) - 1, 0),
    )
    values, _ = jax.jit(make_fns("value").values)(make_params("value"), rows)
    expected = np.take_along_axis(np.asarray(values), before, axis=1)
    scored = jax.jit(
      functools.partial(scoring.score_values, fns=make_fns("value"))
    )(make_params("value"), packed)
    assert scored.keys() == {"values"}
    np.testing.assert_allclose(
      layout.gather(scored["values"])[layout.present],
      expected[layout.present],
      atol=1e-5,
    )
