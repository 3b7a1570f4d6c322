"""Dynamic sampling: groups of mixed verdicts, as the trainer collects them."""

import dataclasses
import itertools

import chex
import numpy as np
import pytest
from helpers.tiny_tppo import (
  GROUP,
  SLOTS,
  collect,
  record,
  trained_tokens,
  whole_responses,
  written_tokens,
)

from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rollout.worker import mixed


class Verdicts:
  """A pool that finds a text right as it is told."""

  def __init__(self, pool, right):
    self._pool, self._right = pool, right

  def __getattr__(self, name):
    return getattr(self._pool, name)

  def judge(self, calls):
    verdicts = self._pool.judge(calls)
    return [
      dataclasses.replace(verdict, correct=self._right(call["response"]))
      for verdict, call in zip(verdicts, calls)
    ]


def judged_by(run, right, **changes):
  """The run under settings, whose verdicts are `right(text)`."""
  judge = Judge(
    run.judge._decode,
    Verdicts(run.judge.pool, right),
    correct=run.config.reward.correct,
    incorrect=run.config.reward.incorrect,
  )
  return whole_responses(dataclasses.replace(run, judge=judge), **changes)


class TestMixedGroups:
  def test_mixed_groups_alone_are_as_without_it(self, run):
    def drawn(dynamic):
      turn = itertools.cycle([True, False])
      chosen = judged_by(
        run, lambda text: next(turn), schedule__dynamic_sampling=dynamic
      )
      return collect(chosen)

    filtered, plain = drawn(True), drawn(False)
    assert plain.batch.responses.correct.sum() == SLOTS // 2
    assert mixed(plain.batch.responses).all()
    chex.assert_trees_all_equal(filtered.batch.responses, plain.batch.responses)
    assert filtered.source_state == plain.source_state
    assert filtered.state == plain.state
    assert filtered.state.store is None

  def test_a_step_trains_on_them(self, run):
    chosen = judged_by(
      run, lambda text: len(text) % 5 == 0, schedule__dynamic_sampling=True
    )
    (step,), (states, _) = record(chosen, 1)
    expected = written_tokens(step.collected.rollout, range(SLOTS))
    assert trained_tokens(step.policy) == expected
    rounds = step.row["rollout/rounds"]
    assert rounds > 1
    assert np.bincount(step.collected.rollout.group).tolist() == [GROUP] * 8
    assert mixed(step.collected).all()
    # Metrics are those of all groups that were judged.
    alike = step.row["rollout/zero_variance_groups"]
    assert alike == pytest.approx(1 - step.row["rollout/mixed_fraction"])
    assert alike > 0
    assert states.source.position == 8 * rounds
