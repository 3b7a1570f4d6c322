"""Decisions between decode calls."""

import numpy as np
import pytest

from jaxrl_llm.sampling import rules
from jaxrl_llm.sampling.rules import Decision, SchedulerView


def _view(slots, waiting, active, ended=0, groups=None, awaiting=0):
  """Makes rows that wait, are active, have ended, or await an environment."""
  counts = [waiting, active, ended, awaiting]
  of = lambda kind: np.repeat(np.arange(4) == kind, counts)
  rows = sum(counts)
  return SchedulerView(
    slots=slots,
    waiting=of(0),
    active=of(1),
    awaiting_environment=of(3),
    ended=of(2),
    lengths=np.zeros(rows, np.int32),
    groups=np.zeros(rows, np.int32) if groups is None else np.asarray(groups),
  )


class TestContinuousBatching:
  @pytest.mark.parametrize(
    "slots, waiting, active, inserted",
    [
      (32, 40, 0, 32),  # All at the start.
      (32, 40, 32, 0),
      (32, 40, 29, 0),  # Three are too few for a prefill.
      (32, 40, 28, 4),
      (32, 3, 29, 3),  # Unless no more are waiting.
      (32, 2, 30, 2),
      (7, 5, 6, 1),  # Few slots: filled one by one.
      (1, 5, 0, 1),
      (1, 5, 1, 0),
    ],
  )
  def test_fills_free_slots_some_at_a_time(
    self, slots, waiting, active, inserted
  ):
    got = rules.continuous_batching(_view(slots, waiting, active, ended=3))
    assert min(got.insert, waiting) == inserted
    assert got._replace(insert=0) == Decision()


class TestStopAfterGroups:
  def test_a_group_is_complete_when_all_of_it_has_ended(self):
    ended = np.array([True, False, True, True, False, True])
    groups = np.array([0, 0, 1, 1, 2, 4])  # None of group 3.
    got = rules.complete(ended, groups)
    np.testing.assert_array_equal(got, [False, True, False, False, True])

  def test_halts_when_enough_groups_have_ended(self):
    view = _view(4, 1, 2, ended=3, groups=[2, 0, 2, 0, 1, 3])
    assert rules.stop_after_groups(2)(view) == Decision(halt=True)
    assert rules.stop_after_groups(1)(view) == Decision(halt=True)
    assert rules.stop_after_groups(3)(view) == rules.continuous_batching(view)

  def test_waits_for_rows_that_are_awaited(self):
    view = _view(4, 1, 2, ended=3, groups=[2, 0, 2, 0, 1, 3])
    halt = rules.stop_after_groups(2, awaited=[3, 5])
    assert halt(view) == Decision(halt=True)
    wait = rules.stop_after_groups(2, awaited=[5, 2])
    assert wait(view) == rules.continuous_batching(view)


class TestStopAfterResponses:
  def test_halts_when_enough_have_ended_or_paused(self):
    view = _view(4, 1, 2, ended=3)
    assert rules.stop_after_responses(2)(view) == Decision(halt=True)
    assert rules.stop_after_responses(3)(view) == Decision(halt=True)
    goes_on = rules.continuous_batching(view)
    assert rules.stop_after_responses(4)(view) == goes_on
    # A request at the end of its window neither waits nor has a slot.
    paused = view._replace(ended=np.zeros(6, bool))
    assert rules.stop_after_responses(3)(paused) == Decision(halt=True)
    # Nor does one that awaits a tool, but it will continue.
    view = _view(4, 1, 2, ended=2, awaiting=3)
    assert rules.stop_after_responses(2)(view) == Decision(halt=True)
    goes_on = rules.continuous_batching(view)
    assert rules.stop_after_responses(3)(view) == goes_on
