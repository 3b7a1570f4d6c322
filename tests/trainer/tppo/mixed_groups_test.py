"""Dynamic sampling: groups of mixed verdicts, as the trainer collects them."""

import dataclasses
import itertools

import chex
import numpy as np
import pytest
from helpers.tiny_tppo import (
  GROUP,
  LIMIT,
  SLOTS,
  collect,
  record,
  trained_tokens,
  whole_responses,
  written_tokens,
)

from jaxrl_llm import types
from jaxrl_llm.errors import TrainingStopped
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
  def collect(self, run, right, **changes):
    """A batch whose verdicts are `right(text)`."""
    return collect(
      judged_by(run, right, schedule__dynamic_sampling=True, **changes)
    )

  def test_gives_so_many_groups_and_all_mixed(self, run):
    collected = self.collect(run, lambda text: len(text) % 5 == 0)
    responses = collected.batch.responses
    group = responses.rollout.group
    rounds = collected.batch.metrics["rollout/rounds"]
    np.testing.assert_array_equal(np.bincount(group), [GROUP] * 8)
    right = np.bincount(group, responses.correct)
    assert (right > 0).all() and (right < GROUP).all()
    assert rounds > 1  # One round had too few.
    assert collected.source_state.position == 8 * rounds
    assert collected.state.samples == 32 * rounds
    assert np.unique(responses.rollout.sample_id).size == 32

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

  def test_the_surplus_is_dropped(self, run):
    right = lambda text: len(text) % 2 == 0
    collected = self.collect(run, right, schedule__over_provision=3)
    assert collected.batch.metrics["rollout/rounds"] == 1
    assert collected.source_state.position == 24
    assert collected.state.samples == 96 and collected.state.store is None
    # All that was drawn, in the order of the source.
    everything = judged_by(run, right, data__prompts_per_step=24)
    drawn = collect(everything).batch.responses
    rows = np.flatnonzero(mixed(drawn))
    assert rows.size > 8 * GROUP
    assert collected.batch.metrics["rollout/mixed_fraction"] == rows.size / 96
    first = types.take_rows(drawn, rows[: 8 * GROUP])
    np.testing.assert_array_equal(
      collected.batch.responses.rollout.sample_id, first.rollout.sample_id
    )
    np.testing.assert_array_equal(
      collected.batch.responses.rewards, first.rewards
    )

  @pytest.mark.parametrize("right", [True, False])
  def test_gives_up_with_the_numbers(self, run, right):
    with pytest.raises(
      TrainingStopped,
      match="^3 rounds judged 48 groups, but only 0 of the 8 needed",
    ):
      self.collect(
        run,
        lambda text: right,
        schedule__max_rounds=3,
        schedule__over_provision=2,
      )

  def test_verdicts_count_not_shaped_rewards(self, run):
    """Responses of other lengths are not yet a mixed group."""
    shaped = {"reward__overlong_buffer": LIMIT}
    with pytest.raises(TrainingStopped):
      self.collect(run, lambda text: True, schedule__max_rounds=1, **shaped)
    right = lambda text: len(text) % 3 == 0
    plain = self.collect(run, right).batch.responses
    punished = self.collect(run, right, **shaped).batch.responses
    chex.assert_trees_all_equal(punished, plain)
    assert set(np.unique(plain.rewards)) == {-1.0, 1.0}

  def test_a_step_trains_on_them(self, run):
    chosen = judged_by(
      run, lambda text: len(text) % 5 == 0, schedule__dynamic_sampling=True
    )
    (step,), (states, _) = record(chosen, 1)
    expected = written_tokens(step.collected.rollout, range(SLOTS))
    assert trained_tokens(step.policy) == expected
    rounds = step.row["rollout/rounds"]
    assert rounds > 1
    assert mixed(step.collected).all()
    # Metrics are those of all groups that were judged.
    alike = step.row["rollout/zero_variance_groups"]
    assert alike == pytest.approx(1 - step.row["rollout/mixed_fraction"])
    assert alike > 0
    assert states.source.position == 8 * rounds
