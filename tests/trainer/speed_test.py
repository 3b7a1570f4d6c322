"""Tokens per second and utilisation match results by hand."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from helpers import tiny_run

from jaxrl_llm import models
from jaxrl_llm.trainer import speed

ROW = {
  "rollout/tokens": 100.0,
  "perf/tokens": 300.0,
  "time/generate_s": 4.0,
  "time/step_s": 10.0,
  "time/score_s": 1.0,
  "time/update_policy_s": 2.0,
  "time/update_value_s": 3.0,
}


def make_learner(critic=True, tied=True, layers=2, critics=1):
  """Makes a learner on two devices whose critic trains for two epochs."""
  config = dataclasses.replace(
    tiny_run.model_config(), tie_word_embeddings=tied
  )
  smaller = dataclasses.replace(config, num_layers=layers)
  model = lambda epochs, config: types.SimpleNamespace(
    settings=types.SimpleNamespace(epochs=epochs),
    fns=types.SimpleNamespace(config=config, count=critics),
  )
  return types.SimpleNamespace(
    mesh=jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]),
    policy=model(1, config),
    critic=model(2, smaller) if critic else None,
  )


def test_tokens_per_second():
  # No peak is known for a CPU, hence there is no utilisation.
  assert speed.speed(make_learner(), ROW) == {
    "rollout/tokens_per_second": 25.0,
    "perf/tokens_per_second": 30.0,
  }


@pytest.mark.parametrize(
  "settings",
  [{}, {"critic": False}, {"tied": False}, {"layers": 1}, {"critics": 2}],
)
def test_utilisation(settings, monkeypatch):
  monkeypatch.setitem(speed.PEAK_FLOPS, "cpu", 1e6)
  row = dict(ROW)
  if "critic" in settings:
    del row["time/update_value_s"]
  got = speed.speed(make_learner(**settings), row)["perf/mfu"]
  # Parameters in matmuls: the tied embedding counts as the policy's head; an
  # untied embedding would only be looked up.
  config = tiny_run.model_config()
  policy = models.num_params(config)
  layers = settings.get("layers", 2)
  critic = dataclasses.replace(config, num_layers=layers)
  trunk = models.num_params(critic) - config.vocab_size * 32
  critics = settings.get("critics", settings.get("critic", 1))
  # One scoring pass each (2 per token), and 6 per token and epoch.
  done = (2 + 6) * policy + (2 + 12) * trunk * critics
  seconds = 6.0 if critics else 3.0
  np.testing.assert_allclose(got, done * 300.0 / seconds / (1e6 * 2))
