"""Responses between steps: taken, joined, still without a verdict."""

import chex
import numpy as np
import tiny_run

from jaxrl_llm.train import runstate
from jaxrl_llm.types import Status


def make(prompt_ids, seed=0, **changes):
  rollout = tiny_run.random_rollout(
    np.random.default_rng(seed), rows=len(prompt_ids)
  )
  ids = np.asarray(prompt_ids, np.int32)
  return runstate.unjudged(rollout.replace(prompt_id=ids, **changes))


class TestUnjudged:
  def test_has_no_verdict_and_no_visit(self):
    responses = make([0, 0, 1])
    for name in ("rewards", "correct", "policy_visits", "value_visits"):
      assert not responses[name].any()
    assert responses.judged.all()
    assert responses.rewards.dtype == np.float32
    # A run writes into them: no two may share their memory.
    assert not np.shares_memory(responses.policy_visits, responses.value_visits)


class TestEnded:
  def test_all_but_the_truncated(self):
    status = [Status.FINISHED, Status.TRUNCATED, Status.OVERLONG]
    responses = make([0, 1, 2], status=np.asarray(status, np.int32))
    assert responses.ended.tolist() == [True, False, True]


class TestTake:
  def test_by_number_and_by_mask(self):
    responses = make([5, 6, 7])
    taken = runstate.take(responses, np.asarray([2, 0]))
    assert taken.rollout.prompt_id.tolist() == [7, 5]
    np.testing.assert_array_equal(
      taken.rollout.tokens, responses.rollout.tokens[[2, 0]]
    )
    masked = runstate.take(responses, np.asarray([True, False, True]))
    assert masked.rollout.prompt_id.tolist() == [5, 7]
    assert masked.policy_visits.shape == (2, 9)

  def test_is_a_copy(self):
    responses = make([5, 6])
    runstate.take(responses, np.arange(2)).policy_visits[:] = 3
    assert not responses.policy_visits.any()


class TestJoin:
  def test_rows_of_a_prompt_share_a_group(self):
    joined = runstate.join([make([8, 8, 3]), None, make([3, 9, 8], seed=1)])
    assert joined.rollout.prompt_id.tolist() == [8, 8, 3, 3, 9, 8]
    # Numbered by first appearance, as estimators and packing need it.
    assert joined.rollout.group.tolist() == [0, 0, 1, 1, 2, 0]

  def test_one_part_is_itself_and_a_copy(self):
    responses = make([0, 0, 1], group=np.asarray([0, 0, 1], np.int32))
    joined = runstate.join([None, responses])
    chex.assert_trees_all_equal(joined, responses)
    joined.value_visits[:] = 1
    assert not responses.value_visits.any()
