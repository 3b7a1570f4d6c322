"""APRIL in the trainer: no token is too stale, and everything is exact."""

import numpy as np
import pytest
from helpers import tiny_run
from helpers.tiny_tppo import record

from jaxrl_llm.rollout.writer import Weights

STEPS, WANTED, GROUP, MAX_STALENESS = 8, 4, 4, 2


def make_run(model, **changes):
  settings = {
    "schedule__stop": "first_groups",
    "schedule__over_provision": 2.0,
    "schedule__max_staleness": MAX_STALENESS,
    "data__prompts_per_step": WANTED,
    "data__group_size": GROUP,
    "estimator__name": "group",
    "sampler__max_response_length": 40,  # Short or very long responses.
  }
  return tiny_run.make_run(model, **settings | changes)


class TestFirstGroups:
  def test_some_tokens_are_older_than_the_policy_and_all_are_trained(
    self, model
  ):
    history = record(make_run(model), STEPS)[0]
    shares = [step.row["rollout/off_policy_fraction"] for step in history]
    assert shares[0] == 0 and max(shares) > 0.05
    for number, step in enumerate(history):
      rollout = step.collected.rollout
      assert np.all(rollout.window_start == 0)
      old = (rollout.version < number)[rollout.mask]
      assert old.mean() == pytest.approx(shares[number])
      assert step.row["staleness/max"] <= MAX_STALENESS
      assert step.row["rollout/partial"] == (step.store.lengths > 0).sum()

  def test_parked_responses_go_on_exactly(self, model):
    """With a constant policy, they equal responses that were never parked."""
    frozen = make_run(model, optimizer__policy__learning_rate=0.0)
    steps, (states, weights) = record(frozen, 4)
    source, worker = frozen.source, frozen.worker
    samples = states.rollout.samples
    prompts, _ = source.draw(source.init(), samples // GROUP)
    ids = np.arange(samples).reshape(-1, GROUP)
    begun = worker.writer.begin(prompts, ids)
    whole = worker.writer.write(begun, Weights(weights.params))
    for step in steps:
      rollout = step.collected.rollout
      for name in ("tokens", "lengths", "status"):
        np.testing.assert_array_equal(
          rollout[name], whole[name][rollout.sample_id], err_msg=name
        )
      np.testing.assert_allclose(
        rollout.behavior_logprobs,
        whole.behavior_logprobs[rollout.sample_id],
        atol=1e-5,
      )
