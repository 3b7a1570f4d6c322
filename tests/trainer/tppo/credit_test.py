"""The KL in targets of a critic that waits for a full mini-batch."""

import dataclasses

import numpy as np
from helpers.tiny_tppo import record, with_learner

from jaxrl_llm.trainer import build

MANY = 32  # A mini-batch that takes the critic several steps to fill.


class TestKlInReward:
  def test_is_in_the_targets_of_those_that_waited(self, run):
    beta = 0.1
    config = run.config.copy_and_resolve_references()
    config.loss.kl_reward_coefficient = beta
    made = build.make_run(config).learner
    critic = run.learner.critic
    settings = dataclasses.replace(critic.settings, mini_batch=MANY)
    critic = dataclasses.replace(critic, settings=settings)
    # The compiled losses are reused.
    chosen = with_learner(
      run,
      algorithm=made.algorithm,
      members=run.learner.members | {"critic": critic},
      _estimate=made._estimate,
    )
    steps, _ = record(chosen, 5)
    late = [step for step in steps if "value/loss" in step.row]
    waited = 0
    for step in late:
      (seen,) = step.estimated
      scores, returns = seen.scores, seen.experience["returns"]
      fresh = set(step.collected.rollout.sample_id.tolist())
      kl = scores["old_logprobs"] - scores["ref_logprobs"]
      for i in np.flatnonzero(seen.experience["value_mask"].any(axis=1)):
        length = seen.rollout.lengths[i]
        assert scores["old_logprobs"][i, :length].all()
        assert np.abs(kl[i, :length]).max() > 1e-4
        to_go = np.cumsum(kl[i, :length][::-1])[::-1]
        np.testing.assert_allclose(
          returns[i, :length],
          seen.responses.rewards[i] - beta * to_go,
          atol=1e-4,
        )
        waited += int(seen.rollout.sample_id[i]) not in fresh
    assert waited > 5
