"""Advantages of truncated responses, and the KL in delayed critic targets."""

import numpy as np
import reference
from helpers.tiny_tppo import LIMIT, SLOTS, patient_of, record, with_learner

from jaxrl_llm.trainer import build
from jaxrl_llm.types import Status, take_rows


class TestCredit:
  def test_advantages_are_those_of_the_paper(self, run, history):
    alpha, seen_cut, seen_ended = run.config.estimator.alpha, 0, 0
    for step in history:
      (seen,) = step.estimated
      rows = np.arange(SLOTS)  # The following rows waited.
      rollout = take_rows(seen.rollout, rows)
      values = np.float64(seen.scores["values"][rows])
      cut, last = rollout.status == Status.TRUNCATED, rollout.lengths - 1
      rewards = np.zeros(values.shape)
      rewards[rows, last] = np.where(cut, 0.0, seen.responses.rewards[rows])
      lambdas = [
        reference.length_adaptive_lambda(n, alpha) for n in rollout.lengths
      ]
      behind = np.where(cut, values[rows, last], 0.0)
      expected = reference.gae(
        rewards, values, rollout.mask, 1.0, np.c_[lambdas], behind
      )
      found = seen.experience["advantages"][rows]
      np.testing.assert_allclose(
        found[rollout.mask], expected[rollout.mask], atol=1e-5
      )
      assert not found[rows, last][cut].any()
      seen_cut, seen_ended = seen_cut + cut.sum(), seen_ended + (~cut).sum()
    assert seen_cut > 100 and seen_ended > 50
    assert np.abs(values).max() > 0.1

  def test_nothing_after_the_window_matters(self, run, history):
    seen = history[-1].estimated[0]
    cut = seen.rollout.status == Status.TRUNCATED
    after = np.arange(LIMIT)[None] >= seen.rollout.lengths[:, None]
    values, next_values = seen.scores["values"], seen.scores["next_values"]
    rewards = np.where(cut, 5.0, seen.responses.rewards).astype(np.float32)
    again = seen.again(
      run,
      responses=seen.responses.replace(rewards=rewards),
      values=np.where(after, np.nan, values).astype(np.float32),
      next_values=np.where(cut, 7.0, next_values).astype(np.float32),
    )
    mask = seen.experience["policy_mask"]
    np.testing.assert_array_equal(again["policy_mask"], mask)
    np.testing.assert_array_equal(
      again["advantages"][mask], seen.experience["advantages"][mask]
    )


class TestKlInReward:
  def test_is_in_the_targets_of_those_that_waited(self, run):
    beta = 0.1
    config = run.config.copy_and_resolve_references()
    config.loss.kl_reward_coefficient = beta
    made = build.make_run(config).learner
    # The compiled losses are reused.
    chosen = with_learner(
      run, algorithm=made.algorithm, _estimate=made._estimate
    )
    steps, _ = record(patient_of(chosen), 5)
    late = [step for step in steps if step.critic and step.critic_updates]
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
