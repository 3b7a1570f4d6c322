"""Tokens per second and utilisation, by hand."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from helpers import tiny_run

from jaxrl_llm import models
from jaxrl_llm.trainer import speed


class TestSpeed:
  ROW = {
    "rollout/tokens": 100.0,
    "perf/tokens": 300.0,
    "time/generate_s": 4.0,
    "time/step_s": 10.0,
    "time/score_s": 1.0,
    "time/update_policy_s": 2.0,
    "time/update_value_s": 3.0,
  }

  def make_learner(self, critic=True, tied=True, layers=2, critics=1):
    config = dataclasses.replace(
      tiny_run.model_config(), tie_word_embeddings=tied
    )
    smaller = dataclasses.replace(config, num_layers=layers)
    model = lambda epochs, config=config: types.SimpleNamespace(
      settings=types.SimpleNamespace(epochs=epochs),
      fns=types.SimpleNamespace(config=config, count=critics),
    )
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    return types.SimpleNamespace(
      mesh=mesh,
      policy=model(1),
      critic=model(2, smaller) if critic else None,
    )

  def test_tokens_per_second(self):
    row = speed.speed(self.make_learner(), self.ROW)
    # A CPU has no peak, hence no utilisation.
    assert row == {
      "rollout/tokens_per_second": 25.0,
      "perf/tokens_per_second": 30.0,
    }

  @pytest.mark.parametrize("tied", [True, False])
  @pytest.mark.parametrize("critic", [True, False])
  def test_utilisation(self, critic, tied, monkeypatch):
    monkeypatch.setitem(speed.PEAK_FLOPS, "cpu", 1e6)
    row = dict(self.ROW)
    if not critic:
      del row["time/update_value_s"]
    got = speed.speed(self.make_learner(critic, tied), row)["perf/mfu"]
    # What is multiplied with: the tied embedding is the policy's head, as an
    # untied one would be beside an embedding that is looked up.
    policy = models.num_params(tiny_run.model_config())
    trunk = policy - tiny_run.model_config().vocab_size * 32
    # One scoring pass each, and 6 a token for each epoch.
    done = (2 + 6) * policy + ((2 + 12) * trunk if critic else 0)
    seconds = 6.0 if critic else 3.0
    flops = done * 300.0
    np.testing.assert_allclose(got, flops / seconds / (1e6 * 2))

  def test_an_ensemble_does_more(self, monkeypatch):
    monkeypatch.setitem(speed.PEAK_FLOPS, "cpu", 1e6)
    none, one, two = (
      speed.speed(self.make_learner(**settings), self.ROW)["perf/mfu"]
      for settings in ({"critic": False}, {}, {"critics": 2})
    )
    np.testing.assert_allclose(two - one, one - none)

  def test_a_smaller_critic_does_less(self, monkeypatch):
    monkeypatch.setitem(speed.PEAK_FLOPS, "cpu", 1e6)
    whole, none, one = (
      speed.speed(learner, self.ROW)["perf/mfu"]
      for learner in (
        self.make_learner(),
        self.make_learner(critic=False),
        self.make_learner(layers=1),
      )
    )
    # Half of the layers, which are all that a critic multiplies with.
    np.testing.assert_allclose(one, (whole + none) / 2, rtol=5e-3)
