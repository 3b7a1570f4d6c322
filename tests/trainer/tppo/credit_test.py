"""What windows teach: advantages of cut responses, targets of ended ones."""

import collections

import numpy as np
from helpers.tiny_tppo import (
  LIMIT,
  MANY,
  SLOTS,
  ended_ids,
  named,
  patient_of,
  record,
  with_learner,
)

from jaxrl_llm.trainer import build
from jaxrl_llm.types import Status


def named_values(rollout, i, t):
  prompt = rollout.prompt_tokens[i, : rollout.prompt_lengths[i]]
  return (*map(int, prompt), *map(int, rollout.tokens[i, : t + 1]))


def column_of(rollout, values, mask):
  """Multiset of (token, value) at the masked places of a [B, T] array."""
  return collections.Counter(
    (named_values(rollout, i, t), float(values[i, t]))
    for i, t in np.argwhere(mask)
  )


def packed_column(batches, name):
  """The same of an input of packed batches."""
  return collections.Counter(
    (named(b.packed, *place), float(b.inputs[name][tuple(place)]))
    for b in batches
    for place in np.argwhere(b.mask)
  )


class TestCredit:
  def test_advantages_are_those_of_the_paper(self, run, history):
    alpha, seen_cut, seen_ended = run.config.estimator.alpha, 0, 0
    for step in history:
      (seen,) = step.estimated
      rollout, values = seen.rollout, np.float64(seen.scores["values"])
      advantages = seen.experience["advantages"]
      for i in range(SLOTS):
        length = int(rollout.lengths[i])
        lambda_ = max(0.0, 1.0 - 1.0 / (alpha * length))
        cut = rollout.status[i] == Status.TRUNCATED
        behind = values[i, length - 1] if cut else 0.0
        after = np.append(values[i, 1:length], behind)
        rewards = np.zeros(length)
        rewards[-1] = 0.0 if cut else seen.responses.rewards[i]
        deltas = rewards + after - values[i, :length]
        expected, later = np.zeros(length), 0.0
        for t in reversed(range(length)):
          expected[t] = later = deltas[t] + lambda_ * later
        np.testing.assert_allclose(advantages[i, :length], expected, atol=1e-5)
        if cut:
          assert advantages[i, length - 1] == 0
        seen_cut, seen_ended = seen_cut + cut, seen_ended + (not cut)
      # The losses get these numbers, each at its place.
      assert packed_column(step.policy, "advantages") == column_of(
        rollout, advantages, seen.experience["policy_mask"]
      )
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

  def test_targets_are_returns_of_what_ended(self, run, history):
    for step in history:
      (seen,) = step.estimated
      outcome = np.repeat(seen.responses.rewards[:, None], LIMIT, axis=1)
      mask = seen.experience["value_mask"]
      for batch in step.critic:
        returns = batch.inputs["returns"][batch.mask]
        assert set(np.unique(returns)) <= {-1.0, 1.0}
      assert packed_column(step.critic, "returns") == column_of(
        seen.rollout, outcome, mask
      )
      rng = np.random.default_rng(0)
      other = seen.again(
        run,
        critic_rows=np.arange(len(mask)),
        values=rng.normal(size=mask.shape).astype(np.float32),
      )
      np.testing.assert_array_equal(
        other["value_mask"], seen.rollout.mask & seen.responses.ended[:, None]
      )
      # λ = 1 telescopes: what is left of V is rounding.
      np.testing.assert_allclose(
        other["returns"][mask], outcome[mask], atol=1e-5
      )


class TestWholeMiniBatches:
  def test_the_critic_waits_and_the_policy_goes_on(self, patient):
    waiting, updates, skipped = 0, 0, 0
    for step in patient:
      ready = waiting + len(ended_ids(step.collected))
      assert step.policy
      learned = ready // MANY * MANY
      assert bool(step.critic) == (learned > 0)
      kept = step.waiting
      assert (0 if kept is None else len(kept.rewards)) == ready - learned
      if learned:
        assert step.critic_updates == updates + learned // MANY
      else:
        assert step.critic_updates == updates
        assert "value/loss" not in step.row
        assert "value/explained_variance" not in step.row
        skipped += 1
      waiting, updates = ready - learned, step.critic_updates
    assert skipped >= 2 and updates >= 2

  def test_those_that_wait_are_not_in_the_metrics(self, patient):
    for step in patient:
      # One law: all new tokens were written by the weights that score them.
      assert step.row["sampler_trainer/logprob_diff_max"] <= 1e-5
      assert step.row["staleness/max"] == 0
      (seen,) = step.estimated
      rollout = step.collected.rollout
      assert (
        seen.experience["policy_mask"].sum()
        == (rollout.lengths - rollout.window_start).sum()
      )


class TestKlInReward:
  def test_is_in_the_targets_of_those_that_waited(self, run):
    beta = 0.1
    config = run.config.copy_and_resolve_references()
    config.loss.kl_reward_coefficient = beta
    made = build.make_run(config).learner
    # The losses stay as they are compiled.
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
