"""Replay: groups that are trained on again."""

import dataclasses

import numpy as np
import pytest
from helpers import doors, tiny_run

from jaxrl_llm import register
from jaxrl_llm.data.replay import Replay
from jaxrl_llm.methods.dart import Successes
from jaxrl_llm.types import join_rows, unjudged


def groups(*ids, size=2, right=()):
  """Makes responses of groups; those in `right` have one correct response."""
  rng = np.random.default_rng(ids[0])
  rollout = tiny_run.random_rollout(rng, rows=size * len(ids), group_size=size)
  of = np.repeat(ids, size).astype(np.int32)
  sample = (of * size + np.tile(np.arange(size), len(ids))).astype(np.int32)
  correct = np.isin(of, right) & (np.arange(of.size) % size == 0)
  rollout = rollout.replace(group_id=of, sample_id=sample)
  return unjudged(rollout).replace(correct=correct)


MAKE = {"groups": 2, "capacity": 3, "keep": "all", "seed": 0}


def test_the_oldest_groups_leave_first():
  replay = Replay(**MAKE)
  store = replay.add(None, groups(0, 1))
  assert replay.draw(store, 4) is not None
  store = replay.add(replay.add(store, groups(2)), groups(3, 4))
  assert set(store.rollout.group_id.tolist()) == {2, 3, 4}


def test_nothing_is_replayed_before_there_is_enough():
  replay = Replay(**MAKE)
  assert replay.draw(None, 0) is None
  assert replay.draw(replay.add(None, groups(5)), 0) is None


def test_mixed_groups_alone_are_stored():
  replay = dataclasses.replace(Replay(**MAKE), keep="mixed")
  store = replay.add(None, groups(0, 1, 2, right=(1,)))
  assert set(store.rollout.group_id.tolist()) == {1}
  assert replay.add(store, groups(3)) is store


def test_draws_are_whole_groups_under_ids_of_their_own():
  replay = Replay(**MAKE)
  store = replay.add(None, groups(0, 1, 2))
  seen = set()
  for step in range(20):
    drawn = replay.draw(store, step)
    assert replay.draw(store, step).rollout.group_id.tolist() == (
      drawn.rollout.group_id.tolist()
    )
    ids = drawn.rollout.group_id
    assert len(ids) == 4 and len(set(ids.tolist())) == 2
    seen |= set(ids.tolist())
    for row, sample in enumerate(-1 - drawn.rollout.sample_id):
      (old,) = np.flatnonzero(store.rollout.sample_id == sample)
      for name in ("tokens", "version", "behavior_logprobs"):
        np.testing.assert_array_equal(
          drawn.rollout[name][row], store.rollout[name][old]
        )
  assert seen == {0, 1, 2}


def solved(example_ids, right, **ids):
  """Makes groups of two responses, the first of each correct as in `right`."""
  made = groups(*range(len(example_ids)), **ids)
  correct = np.zeros(len(made.correct), bool)
  correct[::2] = right
  every = np.repeat(example_ids, 2).astype(np.int32)
  return made.replace(
    rollout=made.rollout.replace(example_id=every), correct=correct
  )


class TestSuccesses:
  @pytest.fixture
  def dart(self):
    return Successes(**MAKE)

  def test_the_newest_correct_response_to_a_prompt_is_stored(self, dart):
    store = dart.add(None, solved([7, 8, 9], [True, False, True]))
    assert store.rollout.example_id.tolist() == [7, 9]
    newer = solved([9, 5], [True, False])
    newer.rollout.tokens[0] += 1
    store = dart.add(store, newer)
    assert store.rollout.example_id.tolist() == [7, 9]
    np.testing.assert_array_equal(
      store.rollout.tokens[1], newer.rollout.tokens[0]
    )
    assert dart.add(store, solved([3], [False])) is store
    # A full store drops the oldest one.
    store = dart.add(store, solved([1, 2], [True, True]))
    assert store.rollout.example_id.tolist() == [9, 1, 2]

  def test_it_joins_the_group_that_has_none(self, dart):
    assert dart.draw(None, 0) is None
    assert dart.complete(None, solved([7], [False])) is None
    store = dart.add(None, solved([7, 8], [True, True]))
    batch = solved([8, 7, 6], [True, False, False])
    added = dart.complete(store, batch)
    assert added.rollout.example_id.tolist() == [7]
    assert added.correct.tolist() == [True]
    assert (added.rollout.sample_id < 0).all()
    joined = join_rows([batch, added])
    assert joined.rollout.group.tolist() == [0, 0, 1, 1, 2, 2, 1]
    np.testing.assert_array_equal(
      added.rollout.behavior_logprobs[0], store.rollout.behavior_logprobs[0]
    )

  def test_no_more_groups_than_the_limit(self, dart):
    every = [4, 5, 6]
    store = dart.add(None, solved(every, [True] * 3))
    added = dart.complete(store, solved(every, [False] * 3))
    assert added.rollout.example_id.tolist() == [4, 5]

  def test_a_group_without_a_verdict_is_not_unsolved(self, dart):
    store = dart.add(None, solved([4], [True]))
    failed = solved([4], [False])
    failed = failed.replace(judged=np.zeros_like(failed.judged))
    assert dart.complete(store, failed) is None

  @pytest.mark.slow
  def test_a_run_adds_and_resumes_bit_for_bit(self, model, tmp_path):
    register.reward("rare", lambda tokens: sum(tokens) % 7 == 0)
    rows = doors.train(
      model,
      tmp_path / "run",
      schedule__replay=0.9,
      reward__name="rare",
      method__use=("dars", "dart"),
      data__pool=4,
      schedule__lag=1,
    )
    assert [row["rollout/replayed"] > 0 for row in rows[1:]] == [False, True]
    assert rows[2]["correction/weight_mean"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",  # sapo_test.py has dynamic sampling.
  [
    {"estimator__name": "gae", "optimizer__value__mini_batch": 8},
    {
      "schedule__lag": 1,
      "method__use": ("dars",),
    },
  ],
)
def test_a_run_replays_and_resumes_bit_for_bit(model, tmp_path, changes):
  rows = doors.train(
    model,
    tmp_path / "run",
    schedule__replay=0.5,
    schedule__replay_keep="all",
    run__samples=0,  # Logs all responses.
    run__samples_every=1,
    **changes,
  )
  assert rows[1]["rollout/replayed"] == 0
  assert rows[2]["rollout/replayed"] == 2
  assert rows[2]["staleness/max"] == 1
  assert rows[2]["correction/weight_mean"] > 0
  if "schedule__lag" not in changes:  # Without stale tokens.
    assert rows[2]["sampler_trainer/logprob_diff_max"] < 1e-5
    assert rows[2]["rollout/tokens"] < 0.8 * rows[1]["rollout/tokens"]
