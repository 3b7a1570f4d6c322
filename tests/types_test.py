"""Records of responses: row selection, joining, and missing verdicts."""

import chex
import numpy as np
import pytest
from helpers import tiny_run

from jaxrl_llm import types
from jaxrl_llm.types import Status


def make(group_ids, seed=0, **changes):
  rollout = tiny_run.random_rollout(
    np.random.default_rng(seed), rows=len(group_ids)
  )
  ids = np.asarray(group_ids, np.int32)
  return types.unjudged(rollout.replace(group_id=ids, **changes))


class TestEnded:
  def test_all_but_the_truncated(self):
    status = [Status.FINISHED, Status.TRUNCATED, Status.OVERLONG]
    responses = make([0, 1, 2], status=np.asarray(status, np.int32))
    expected = [True, False, True]
    assert responses.ended.tolist() == expected
    assert types.ended(responses.rollout).tolist() == expected


class TestTakeRows:
  def test_by_number_and_by_mask(self):
    responses = make([5, 6, 7])
    taken = types.take_rows(responses, np.asarray([2, 0]))
    assert taken.rollout.group_id.tolist() == [7, 5]
    np.testing.assert_array_equal(
      taken.rollout.tokens, responses.rollout.tokens[[2, 0]]
    )
    masked = types.take_rows(responses, np.asarray([True, False, True]))
    assert masked.rollout.group_id.tolist() == [5, 7]
    assert masked.rewards.shape == (2,)

  def test_is_a_copy(self):
    responses = make([5, 6])
    types.take_rows(responses, np.arange(2)).rewards[:] = 3
    assert not responses.rewards.any()


class TestJoinRows:
  def test_rows_of_a_draw_share_a_group(self):
    joined = types.join_rows([make([8, 8, 3]), None, make([3, 9, 8], seed=1)])
    assert joined.rollout.group_id.tolist() == [8, 8, 3, 3, 9, 8]
    # Numbered by first appearance, as estimators and packing require.
    assert joined.rollout.group.tolist() == [0, 0, 1, 1, 2, 0]

  def test_rollouts_too(self):
    parts = [make([8]).rollout, make([3, 8], seed=1).rollout]
    joined = types.join_rows(parts)
    assert joined.group.tolist() == [0, 1, 0]
    np.testing.assert_array_equal(joined.tokens[1:], parts[1].tokens)

  def test_one_part_is_itself_and_a_copy(self):
    responses = make([0, 0, 1], group=np.asarray([0, 0, 1], np.int32))
    joined = types.join_rows([None, responses])
    chex.assert_trees_all_equal(joined, responses)
    joined.rewards[:] = 1
    assert not responses.rewards.any()


@pytest.mark.parametrize("seed", range(3))
def test_groups_are_numbered_by_first_appearance(seed):
  ids = np.random.default_rng(seed).integers(0, 9, 30)
  number = {}
  expected = [number.setdefault(i, len(number)) for i in ids.tolist()]
  assert types.group_index(ids).tolist() == expected
