"""Decisions between decode calls, and what comes of them."""

import numpy as np
import pytest
from helpers import scripted, tiny_engine

from jaxrl_llm.sampling import rules
from jaxrl_llm.sampling.rules import Decision, SchedulerView
from jaxrl_llm.types import Status

G = tiny_engine.G


def _view(slots, waiting, active, ended=0, groups=None, asked=0):
  """Rows that wait, then those active, then ended, then asked."""
  counts = [waiting, active, ended, asked]
  of = lambda kind: np.repeat(np.arange(4) == kind, counts)
  rows = sum(counts)
  return SchedulerView(
    slots=slots,
    waiting=of(0),
    active=of(1),
    asked=of(3),
    ended=of(2),
    lengths=np.zeros(rows, np.int32),
    groups=np.zeros(rows, np.int32) if groups is None else np.asarray(groups),
  )


class TestContinuousBatching:
  @pytest.mark.parametrize(
    "slots, waiting, active, inserted",
    [
      (32, 40, 0, 32),  # At first all.
      (32, 40, 32, 0),
      (32, 40, 29, 0),  # Three are too few to be worth it.
      (32, 40, 28, 4),
      (32, 3, 29, 3),  # Unless no more will come.
      (32, 2, 30, 2),
      (7, 5, 6, 1),  # Few slots are filled one by one.
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
    groups = np.array([0, 0, 1, 1, 2, 4])  # None is of group 3.
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
    assert rules.stop_after_responses(4)(view) == rules.continuous_batching(
      view
    )
    # One that came to the end of its window neither waits nor has a slot.
    paused = view._replace(ended=np.zeros(6, bool))
    assert rules.stop_after_responses(3)(paused) == Decision(halt=True)
    # Nor has one that waits for a tool, but it goes on.
    view = _view(4, 1, 2, ended=2, asked=3)
    assert rules.stop_after_responses(2)(view) == Decision(halt=True)
    assert rules.stop_after_responses(3)(view) == rules.continuous_batching(
      view
    )

  def test_the_others_go_on_to_what_they_would_have_been(self):
    full = tiny_engine.expected()
    out = tiny_engine.generate(rule=rules.stop_after_responses(5))
    halted = out.status == Status.TRUNCATED
    assert 5 <= (~halted).sum() < len(halted)
    tiny_engine.assert_same_responses(
      tiny_engine.rows(out, ~halted), tiny_engine.rows(full, ~halted)
    )
    tiny_engine.assert_same_responses(
      tiny_engine.go_on(out), tiny_engine.rows(full, halted)
    )


def _stopping_at(*decisions):
  """Refills, and says the decisions at the scheduler steps 1, 2, ..."""
  rest = list(decisions)

  def decide(view):
    if not np.any(view.lengths):
      return rules.continuous_batching(view)  # Nothing is written yet.
    said = rest.pop(0) if rest else Decision()
    return said._replace(insert=rules.continuous_batching(view).insert)

  return decide


class TestHalt:
  def test_what_is_left_goes_on_to_what_it_would_have_been(self):
    full = tiny_engine.expected()
    out = tiny_engine.generate(rule=rules.stop_after_groups(1))
    halted = out.status == Status.TRUNCATED
    done = rules.complete(~halted, out.group)
    assert done.any() and not done.all()
    tiny_engine.assert_same_responses(
      tiny_engine.rows(out, ~halted), tiny_engine.rows(full, ~halted)
    )
    mask = np.arange(tiny_engine.T)[None] < out.lengths[:, None]
    np.testing.assert_array_equal(out.mask, mask)
    np.testing.assert_array_equal(out.tokens, np.where(mask, full.tokens, 0))
    # Some were being written, some had no slot yet.
    assert np.any(out.lengths[halted] > 0)
    assert np.any(out.lengths[halted] == 0)
    rest = tiny_engine.go_on(out)
    tiny_engine.assert_same_responses(rest, tiny_engine.rows(full, halted))
    np.testing.assert_array_equal(rest.window_start, out.lengths[halted])

  def test_at_once_gives_rows_that_have_not_begun(self):
    full = tiny_engine.expected()
    out = tiny_engine.generate(rule=lambda view: Decision(halt=True))
    assert not np.any(out.lengths) and not np.any(out.mask)
    assert set(out.status) == {Status.TRUNCATED}
    tiny_engine.assert_same_responses(tiny_engine.go_on(out), full)

  def test_more_groups_than_there_are_is_no_limit(self):
    out = tiny_engine.generate(rule=rules.stop_after_groups(100))
    tiny_engine.assert_same_responses(out, tiny_engine.expected())


class TestStop:
  def test_gives_rows_up_and_their_slots_to_others(self):
    prompts = [scripted.prompt(50, i) for i in range(40)]
    plain = scripted.generate(prompts)
    scripted.check(plain, prompts)
    steps = scripted.engine().last_stats.decode_steps
    # Rows that are active, and one that waits.
    decision = Decision(stop=[*range(12), 39])
    out = scripted.generate(prompts, rule=_stopping_at(decision))
    stopped = out.status == Status.STOPPED
    np.testing.assert_array_equal(np.flatnonzero(stopped), decision.stop)
    scripted.check(
      tiny_engine.rows(out, ~stopped), [prompts[i] for i in range(12, 39)]
    )
    assert scripted.engine().last_stats.decode_steps < steps
    np.testing.assert_array_equal(out.lengths[:12], 8)  # A page's length.
    assert out.lengths[39] == 0
    np.testing.assert_array_equal(out.mask.sum(axis=1), out.lengths)
    written = np.arange(scripted.T)[None] < out.lengths[:, None]
    np.testing.assert_array_equal(
      out.tokens, np.where(written, plain.tokens, 0)
    )

  def test_what_stopped_before_ends_no_call_and_keeps_none_alive(self):
    prompts = [scripted.prompt(9, i) for i in range(40)]

    def decide(view):
      # Says the same at every step, also when nothing is left to do.
      return rules.continuous_batching(view)._replace(stop=range(16))

    out = scripted.generate(prompts, rule=decide)
    np.testing.assert_array_equal(out.status[:16], int(Status.STOPPED))
    scripted.check(tiny_engine.rows(out, slice(16, None)), prompts[16:])


class TestFork:
  def test_goes_on_from_the_same_tokens_with_other_randomness(self):
    full = tiny_engine.expected()
    state = {}

    def decide(view):
      going = np.flatnonzero(view.active & (view.lengths > 0))
      if state or not len(going):
        return rules.continuous_batching(view)
      state.update(parents=going[:3], lengths=view.lengths[going[:3]].copy())
      fork = [(int(row), 900 + int(row)) for row in going[:3]]
      return Decision(insert=view.free, fork=fork)

    out = tiny_engine.generate(rule=decide)
    count = len(full.lengths)
    tiny_engine.assert_same_responses(tiny_engine.rows(out, slice(count)), full)
    children = tiny_engine.rows(out, slice(count, None))
    parents = tiny_engine.rows(full, state["parents"])
    np.testing.assert_array_equal(children.sample_id, 900 + state["parents"])
    for name in (
      "prompt_tokens",
      "prompt_lengths",
      "group_id",
      "example_id",
      "group",
    ):
      np.testing.assert_array_equal(children[name], parents[name])
    shared = np.arange(tiny_engine.T)[None] < state["lengths"][:, None]
    assert shared.any(axis=1).all()
    np.testing.assert_array_equal(
      np.where(shared, children.tokens, 0), np.where(shared, parents.tokens, 0)
    )
    np.testing.assert_allclose(
      np.where(shared, children.behavior_logprobs, 0),
      np.where(shared, parents.behavior_logprobs, 0),
      rtol=0,
      atol=1e-5,
    )
    assert np.all(children.lengths > state["lengths"])
    assert set(children.status) <= {Status.FINISHED, Status.OVERLONG}
    assert np.any(children.tokens != parents.tokens)

  @pytest.mark.parametrize(
    ("fork", "message"),
    [
      ((0, 3), "sample ids must differ, got .3. more than once"),
      ((39, 500), "can be forked, got row 39 with 0 tokens"),
      ((1, 500), "can be forked, got row 1 with .* tokens and status"),
    ],
  )
  def test_refuses_what_cannot_be_a_branch(self, fork, message):
    prompts = [scripted.prompt(50, i) for i in range(40)]
    prompts[1] = scripted.prompt(8, 1)
    decision = _stopping_at(Decision(fork=[fork]))
    with pytest.raises(ValueError, match=message):
      scripted.generate(prompts, rule=decision)

  def test_branches_of_many_rows_are_right_to_the_token(self):
    prompts = [scripted.prompt(30 + i, i) for i in range(24)]
    forks = [
      Decision(fork=[(i % 8, first + i) for i in range(20)])
      for first in (500, 600)
    ]
    out = scripted.generate(prompts, rule=_stopping_at(*forks))
    again = [prompts[i % 8] for i in range(20)]
    scripted.check(out, prompts + again + again)
