"""Sampler and trainer agree for the shipped base and the default config."""

import contextlib

import numpy as np
import pytest
from helpers import configs, tiny_run

from jaxrl_llm import sync
from jaxrl_llm.learner import packing
from jaxrl_llm.trainer import build
from jaxrl_llm.types import take_rows


@pytest.fixture(scope="module")
def run():
  config = configs.load("vapo")
  config.data.prompts_per_step = 8
  config.data.group_size = 8
  config.optimizer.policy.mini_batch = 32
  config.optimizer.value.mini_batch = 32
  config.mesh.data = 1
  return build.make_run(config)


@pytest.mark.slow
def test_sampler_and_trainer_agree_on_every_token(run):
  with contextlib.closing(run.judge):
    states, _, collected = tiny_run.collect(run)
  rollout, learner = collected.batch.responses.rollout, run.learner
  assert len(rollout.lengths) == 64
  batches = packing.mini_batches(
    rollout,
    size=32,
    rng=None,
    capacity=learner.settings.max_tokens_per_row,
    rows=learner.policy.settings.micro_batch_size,
  )
  assert len(batches) == 2
  for batch in batches:
    out = learner.score(states.learner, "policy", batch)
    trained = batch.layout.gather(out.logprobs)
    sampled = take_rows(rollout, batch.rows)
    ours = trained[sampled.mask]
    theirs = sampled.behavior_logprobs[sampled.mask]
    # The metric of `sync.make_parity_check`. Logits reach 20 here, so that
    # float32 itself differs from float64 by up to 1.2e-5, at an improbable
    # token (log-prob -3.9).
    error = np.abs(ours - theirs) / np.maximum(1, np.abs(ours))
    assert error.max() <= sync.TOLERANCES["float32"]
    # Rounding errors this large are rare; a bug would affect all tokens.
    assert np.abs(ours - theirs).mean() <= 1e-6
