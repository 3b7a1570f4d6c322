"""Dynamic sampling: groups of mixed verdicts, as the trainer collects them."""

import dataclasses
import itertools

import chex
import numpy as np
import pytest
from helpers import tiny_run
from helpers.tiny_mesh_run import Spy
from helpers.tiny_tppo import (
  GROUP,
  SLOTS,
  record,
  trained_tokens,
  whole_responses,
  written_tokens,
)

from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.types import mixed


def judged_by(run, right, **changes):
  """The run under settings, whose verdicts are `right(text)`."""
  pool = run.judge.pool

  def verdicts(calls):
    return [
      dataclasses.replace(verdict, correct=right(call["response"]))
      for verdict, call in zip(pool.judge(calls), calls)
    ]

  judge = Judge(
    run.judge.decode,
    Spy(pool, judge=verdicts),
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
      return tiny_run.collect(chosen)[-1]

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
