"""Which responses a schedule asks for, and which groups it keeps."""

import types

import numpy as np
import pytest
import tiny_run

from jaxrl_llm import config as config_lib
from jaxrl_llm.data.prompts import Prompt
from jaxrl_llm.train import collect, runstate


class Stream:
  """Prompts by position; those at a multiple of `gap` are too long."""

  def __init__(self, gap=None):
    self._gap = gap

  def take(self, position, n):
    prompts = []
    while len(prompts) < n:
      if not self._gap or position % self._gap:
        prompts.append(
          Prompt(
            prompt_id=position,
            tokens=(position,),
            text="",
            example_id="",
            question="",
            answer="",
            source="",
          )
        )
      position += 1
    return prompts


def make_job(group_size=4, gap=None):
  config = tiny_run.make_config("none", data__group_size=group_size)
  return types.SimpleNamespace(config=config, train_prompts=Stream(gap))


def make_state():
  counters = {"position": 0, "member": 0, "samples": 0}
  names = runstate.RunState.__dataclass_fields__
  return runstate.RunState(**dict.fromkeys(names) | counters)


def make_responses(groups, correct):
  rollout = tiny_run.random_rollout(
    np.random.default_rng(0), rows=len(groups)
  ).replace(group=np.asarray(groups, np.int32))
  responses = runstate.unjudged(rollout)
  return responses.replace(correct=np.asarray(correct, bool))


class TestNextPrompts:
  def test_go_on_where_the_last_ones_ended(self):
    job, state = make_job(gap=3), make_state()
    drawn = [
      [p.prompt_id for p in collect.next_prompts(job, state, count)]
      for count in (2, 3)
    ]
    assert drawn == [[1, 2], [4, 5, 7]]
    assert state.position == 8


class TestNextMembers:
  def test_by_hand(self):
    job, state = make_job(), make_state()
    prompts, ids = collect.next_members(job, state, 6)
    assert [p.prompt_id for p in prompts] == [0, 1]
    assert [x.tolist() for x in ids] == [[0, 1, 2, 3], [4, 5]]
    # Prompt 1 waits with two of its four responses.
    assert (state.position, state.member, state.samples) == (1, 2, 6)
    prompts, ids = collect.next_members(job, state, 1)
    assert [p.prompt_id for p in prompts] == [1]
    assert [x.tolist() for x in ids] == [[6]]
    assert (state.position, state.member, state.samples) == (1, 3, 7)
    prompts, ids = collect.next_members(job, state, 5)
    assert [p.prompt_id for p in prompts] == [1, 2]
    assert [x.tolist() for x in ids] == [[7], [8, 9, 10, 11]]
    assert (state.position, state.member, state.samples) == (3, 0, 12)

  def test_none(self):
    job, state = make_job(), make_state()
    collect.next_members(job, state, 3)
    assert collect.next_members(job, state, 0) == ([], [])
    assert (state.position, state.member, state.samples) == (0, 3, 3)

  @pytest.mark.parametrize("gap", [None, 3])
  @pytest.mark.parametrize("group_size", [1, 3, 4])
  @pytest.mark.parametrize("seed", range(5))
  def test_every_member_of_every_prompt_once_and_in_order(
    self, seed, group_size, gap
  ):
    rng = np.random.default_rng(seed)
    job, state = make_job(group_size, gap), make_state()
    owners, numbers = [], []
    for count in rng.integers(0, 3 * group_size + 1, 20).tolist():
      prompts, ids = collect.next_members(job, state, count)
      assert sum(x.size for x in ids) == count
      assert all(x.size and x.dtype == np.int32 for x in ids)
      for prompt, own in zip(prompts, ids, strict=True):
        owners += [prompt.prompt_id] * own.size
        numbers += own.tolist()
    # Numbers are consecutive, whatever the calls were.
    assert numbers == list(range(state.samples))
    whole = [p.prompt_id for p in Stream(gap).take(0, len(numbers) + 1)]
    expected = [p for p in whole for _ in range(group_size)]
    assert owners == expected[: len(owners)]
    assert state.member == len(owners) % group_size


class TestMixed:
  def test_by_hand(self):
    # Rows of group 0 are mixed, of 1 all right, of 2 all wrong; 3 is single.
    responses = make_responses(
      [0, 1, 2, 0, 1, 2, 3, 0], [1, 1, 0, 0, 1, 0, 1, 0]
    )
    np.testing.assert_array_equal(
      collect.mixed(responses), [1, 0, 0, 1, 0, 0, 0, 1]
    )

  def test_without_a_verdict_nothing_is_wrong(self):
    responses = make_responses([0, 0, 1, 1, 1], [1, 0, 1, 0, 0])
    judged = np.asarray([True, False, True, False, True])
    np.testing.assert_array_equal(
      collect.mixed(responses.replace(judged=judged)), [0, 0, 1, 1, 1]
    )

  def test_verdicts_count_not_rewards(self):
    responses = make_responses([0, 0], [1, 1])
    responses = responses.replace(rewards=np.asarray([1.0, 0.5], np.float32))
    assert not collect.mixed(responses).any()


class TestPromptsOf:
  def test_every_row_gets_its_prompt(self):
    rollout = tiny_run.random_rollout(np.random.default_rng(0), rows=4)
    rollout = rollout.replace(prompt_id=np.asarray([7, 2, 7, 5]))
    prompts = collect.prompts_of(make_job(), rollout)
    assert [p.prompt_id for p in prompts] == [7, 2, 7, 5]


class TestScheduleOf:
  @pytest.mark.parametrize(
    ("name", "dynamic", "expected"),
    [
      ("full", False, "full"),
      ("full", True, "mixed_groups"),
      ("window", False, "window"),
    ],
  )
  def test_follows_the_config(self, name, dynamic, expected):
    config = config_lib.default_config()
    config.schedule.name = name
    config.schedule.dynamic_sampling = dynamic
    assert collect.schedule_of(config) == expected
    assert expected in collect.SCHEDULES


def test_streams_of_randomness_differ():
  job = make_job()
  keys = [
    collect.run_key(job, stream)
    for stream in (collect.ROLLOUTS, collect.EVALUATION, collect.PRETRAINING)
  ]
  assert len({str(key) for key in keys}) == 3
  job.config.run.seed = 1
  assert collect.run_key(job, collect.ROLLOUTS) != keys[0]
