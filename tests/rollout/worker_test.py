"""Which responses a worker generates and which groups it returns; no model.

The engine is scripted: the length of a response is a function of its id.
"""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from helpers import tiny_run

from jaxrl_llm import sampling
from jaxrl_llm.data.prompt_source import PromptSourceState
from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.errors import InputError, TrainingStopped
from jaxrl_llm.metrics import PhaseTimer
from jaxrl_llm.rewards.exact import Verdict
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rollout import schedule
from jaxrl_llm.rollout.schedule import RolloutSettings
from jaxrl_llm.rollout.worker import RolloutWorker, run_key
from jaxrl_llm.rollout.writer import ResponseWriter, Weights
from jaxrl_llm.sampling import EngineConfig, EngineStats, SamplingSettings
from jaxrl_llm.sampling.rules import SchedulerView
from jaxrl_llm.trainer import rollouts
from jaxrl_llm.types import (
  Status,
  ended,
  group_index,
  is_demonstrated,
  mixed,
  take_rows,
  too_old,
  unjudged,
)

LIMIT = 6


def length_of(sample_id):
  """Returns the number of tokens of a response, 1 to LIMIT."""
  return int(np.random.default_rng(sample_id).integers(1, LIMIT + 1))


class Engine:
  """Writes one token per response at a time, in order of the rows."""

  config = EngineConfig(
    slots=8, max_prompt_length=4, max_response_length=LIMIT, stop_tokens=[1]
  )

  def __init__(self, lengths, slots):
    self.stats, self._length_of, self._slots = EngineStats(), lengths, slots

  def generate_window(
    self, params, requests, *, window, version, rule, **settings
  ):
    assert len(requests.lengths)
    rollout = jax.tree.map(np.array, requests)
    assert (rollout.status == Status.TRUNCATED).all()
    begins = rollout.lengths.copy()
    ends = np.asarray([self._length_of(i) for i in rollout.sample_id])
    while True:
      over = ended(rollout)
      active = ~over & (rollout.lengths - begins < window)
      active &= np.cumsum(active) <= self._slots
      view = SchedulerView(
        slots=len(begins),
        waiting=np.zeros(len(begins), bool),
        active=active,
        awaiting_environment=np.zeros(len(begins), bool),
        ended=over,
        lengths=rollout.lengths,
        groups=rollout.group,
      )
      if not active.any() or rule(view).halt:
        break
      rows, at = np.flatnonzero(active), rollout.lengths[active]
      rollout.tokens[rows, at] = 10 * rollout.sample_id[rows] + at
      rollout.mask[rows, at] = True
      rollout.version[rows, at] = version
      rollout.lengths[rows] += 1
      rollout.status[rollout.lengths >= ends] = int(Status.FINISHED)
    self.stats += EngineStats(tokens=int((rollout.lengths - begins).sum()))
    return rollout.replace(window_start=begins)


class Source:
  """Prompts by position; `examples` maps positions to examples."""

  has_several_sources = False

  def __init__(
    self,
    examples=lambda position: position,
    *,
    tries=lambda example: 0,
    again=lambda source, state, judged: ([], state),
    opening=(),
  ):
    self._examples, self._tries, self._again = examples, tries, again
    self._opening = opening

  def init(self):
    return PromptSourceState(position=0, drawn=0)

  def draw(self, state, n):
    drawn = state.drawn + n
    draws = range(state.drawn, drawn)
    prompts = [self.prompt(self._examples(draw), draw) for draw in draws]
    return prompts, PromptSourceState(position=drawn, drawn=drawn)

  def again(self, state, judged):
    return self._again(self, state, judged)

  def observe(self, state, responses):
    return state

  def prompt(self, example_id, group_id):
    return Prompt(
      tries=self._tries(example_id),
      opening=self._opening,
      example_id=example_id,
      group_id=group_id,
      tokens=(2 + example_id % 50,),
      text=f"question {example_id}",
      id=f"name {example_id}",
      question=str(example_id),
      answer=f"answer {example_id}",
      source="test",
    )


class Pool:
  """Judges by the id of a response, which its tokens encode."""

  def __init__(self, right):
    self._right = right
    self.seen = []  # (sample id, answer) per response.

  def judge(self, calls):
    assert all(call["finished"] for call in calls)
    ids = [int(call["response"]) for call in calls]
    self.seen += zip(ids, (call["answer"] for call in calls))
    return [Verdict(bool(self._right(i)), "") for i in ids]


class Run:
  """A worker, its parts, and its state."""

  def __init__(
    self,
    *,
    right=lambda i: i % 2 == 0,
    source=None,
    lengths=length_of,
    slots=1000,
    **settings,
  ):
    settings = {"groups": 2, "group_size": 4} | settings
    settings.setdefault("in_flight", settings["groups"])
    self.settings = RolloutSettings(**settings)
    self.engine, self.source = Engine(lengths, slots), source or Source()
    self.pool = Pool(right)
    self.renew()
    self.state, self.source_state = self.worker.init(), self.source.init()
    self.version = 0

  def renew(self):
    """Replaces the worker by a new one, which has only the state."""
    writer = ResponseWriter(
      self.engine,
      SamplingSettings(max_new_tokens=LIMIT),
      run_key(0, 1),
      self.settings.group_size,
      Judge(lambda tokens: str(tokens[0] // 10), self.pool),
    )
    self.worker = RolloutWorker(writer, self.source, self.settings)

  def collect(self):
    collected = self.worker.collect(
      self.state,
      self.source_state,
      Weights(params=None, version=self.version),
      PhaseTimer(),
    )
    self.state, self.source_state = collected.state, collected.source_state
    self.version += 1
    return collected


def ids_of(record):
  rollout = getattr(record, "rollout", record)
  return [] if rollout is None else rollout.sample_id.tolist()


def once_more(source, state, judged):
  """Redraws each prompt with a wrong response, with three new responses."""
  wrong = judged.responses.rollout.example_id[~judged.responses.correct]
  prompts = [
    dataclasses.replace(source.prompt(i, state.drawn + k), tries=3)
    for k, i in enumerate(np.unique(wrong).tolist())
  ]
  return prompts, state.replace(drawn=state.drawn + len(prompts))


def waiting_ids(run):
  """Returns ids of responses without tokens."""
  store = run.state.store
  return [] if store is None else store.sample_id[store.lengths == 0].tolist()


class TestTries:
  @pytest.mark.parametrize("stop", ["all", "first_groups"])
  def test_a_group_has_its_own_size(self, stop):
    source = Source(tries=lambda example: (0, 1, 6)[example % 3])
    run = Run(source=source, stop=stop, groups=3, in_flight=4, max_staleness=4)
    sizes, ids = {}, []
    for _ in range(4):
      batch = run.collect().batch.responses.rollout
      assert len(np.unique(batch.group)) == 3
      sizes |= dict(zip(*np.unique(batch.group_id, return_counts=True)))
      ids += batch.sample_id.tolist()
    assert len(sizes) == 12 and len(set(ids)) == len(ids)
    # Group ids are positions here, and so are examples.
    assert all(size == (4, 1, 6)[i % 3] for i, size in sizes.items())
    assert sorted(ids + ids_of(run.state.store)) == list(
      range(run.state.samples)
    )

  def test_windows_fill_the_slots_with_whatever_has_begun(self):
    run = Run(window=1, source=Source(tries=lambda example: 1 + example % 5))
    seen = set()
    for _ in range(12):
      batch = run.collect().batch.responses.rollout
      assert len(batch.lengths) <= 8
      seen |= set(ids_of(batch))
    assert sorted(seen | set(waiting_ids(run))) == list(
      range(run.state.samples)
    )

  def test_a_negative_number_is_refused(self):
    run = Run(source=Source(tries=lambda example: -2))
    with pytest.raises(InputError, match="prompt 'name 0' has tries=-2; give"):
      run.collect()


class TestOpening:
  def test_is_neither_written_nor_stale(self):
    # No group in flight began longer ago than the maximum staleness.
    run = Run(
      source=Source(opening=(7, 8)),
      lengths=lambda i: LIMIT if i % 8 > 3 else 4,
      stop="first_groups",
      in_flight=3,
      max_staleness=2,
    )
    written = 0
    for _ in range(6):
      collected = run.collect()
      rollout = collected.batch.responses.rollout
      written += rollout.mask.sum()
      assert (rollout.tokens[:, :2] == [7, 8]).all()
      assert (rollout.mask.sum(axis=1) == rollout.lengths - 2).all()
      assert not rollout.window_start.any()
      row = collected.batch.metrics
      assert row["rollout/response_length_mean"] == rollout.lengths.mean()
      store = run.state.store
      assert row["rollout/partial"] == store.mask.any(axis=1).sum()
    goes_on = run.state.store.mask.sum()
    assert goes_on and written + goes_on == run.engine.stats.tokens

  def test_has_no_age(self):
    rows = Run(source=Source(opening=(7, 8)))
    rows.collect()
    begun = rows.worker.writer.begin([rows.source.prompt(1, 5)], [[0, 1]])
    assert too_old(begun, version=9, max_staleness=1).size == 0
    begun.mask[1, 2], begun.version[1, 2] = True, 8
    assert too_old(begun, version=9, max_staleness=1).tolist() == [0, 1]
    assert too_old(begun, version=9, max_staleness=2).size == 0


class TestSecondLook:
  def test_joins_the_batch(self):
    # All responses of every other group are correct.
    run = Run(right=lambda i: i % 8 < 4, source=Source(again=once_more))
    before = np.zeros(0, int)
    for step in range(3):
      collected = run.collect()
      rollout = collected.batch.responses.rollout
      first, more = rollout.sample_id[:8], rollout.sample_id[8:]
      assert first.tolist() == [*range(before.size, before.size + 8)]
      assert more.size % 3 == 0 and more.tolist() == [
        *range(first[-1] + 1, first[-1] + 1 + more.size)
      ]
      asked = rollout.example_id[:8][~collected.batch.responses.correct[:8]]
      assert (
        rollout.example_id[8:].tolist()
        == np.repeat(np.unique(asked), 3).tolist()
      )
      # They are separate groups, and judged with the others.
      assert not np.isin(rollout.group_id[8:], rollout.group_id[:8]).any()
      assert run.pool.seen[-1] == (more[-1], f"answer {rollout.example_id[-1]}")
      assert not rollout.window_start.any() and ended(rollout).all()
      assert (rollout.version[rollout.mask] == step).all()
      row = collected.batch.metrics
      assert row["rollout/again"] == more.size > 0
      assert row["rollout/again_tokens"] == rollout.mask[8:].sum()
      assert row["rollout/tokens"] == rollout.mask.sum()
      before = np.append(before, rollout.sample_id)
    assert run.state.samples == before.size and run.state.store is None

  def test_may_add_to_a_group(self):
    def more(source, state, judged):
      prompt = judged.prompts[0]
      return [dataclasses.replace(prompt, tries=2)], state

    rollout = Run(source=Source(again=more)).collect().batch.responses.rollout
    assert np.bincount(rollout.group).tolist() == [6, 4]

  @pytest.mark.parametrize("sampled", [0, 1])
  def test_may_demonstrate_a_response(self, sampled):
    def more(source, state, judged):
      first, last = judged.prompts[0], judged.prompts[-1]
      shown = {"opening": (7, 8), "demonstrated": (True, False)}
      given = dataclasses.replace(first, tries=1, **shown)
      return [given, *[last] * sampled], state

    run = Run(source=Source(again=more))
    batch = run.collect().batch.responses.rollout
    assert np.bincount(batch.group).tolist() == [5, 4 + 4 * sampled]
    assert is_demonstrated(batch).nonzero()[0].tolist() == [8]
    assert batch.mask[8].nonzero()[0].tolist() == [0]

  def test_windows_refuse_demonstrations(self):
    source, shown = Source(opening=(7,)), {"demonstrated": (True,)}
    plain = source.prompt
    source.prompt = lambda *ids: dataclasses.replace(plain(*ids), **shown)
    with pytest.raises(InputError, match="use schedule.window=0"):
      Run(source=source, window=2).collect()

  def test_sees_what_dynamic_sampling_discards(self):
    seen = []

    def look(source, state, judged):
      seen.append(judged)
      return once_more(source, state, judged)

    run = Run(
      right=lambda i: i < 4 or i % 2 == 0,  # Group 0 has no signal.
      source=Source(again=look),
      dynamic_sampling=True,
      max_rounds=3,
    )
    collected = run.collect()
    (judged,) = seen
    # Two rounds of two groups: three are mixed, two of them are taken.
    assert judged.responses.rollout.sample_id.tolist() == list(range(16))
    assert len(judged.prompts) == len(judged.texts) == len(judged.verdicts)
    assert collected.batch.metrics["rollout/mixed_fraction"] == 3 / 4
    assert collected.batch.metrics["rollout/again"] == 9
    batch = collected.batch.responses.rollout
    assert batch.sample_id.tolist() == [*range(4, 12), *range(16, 25)]


class TestMembers:
  """Windows: free slots take the next responses in order."""

  @pytest.mark.parametrize("group_size", [1, 3, 4])
  @pytest.mark.parametrize("window", [1, 4])
  def test_every_member_of_every_prompt_once_and_in_order(
    self, window, group_size
  ):
    source = Source(lambda position: 3 * position)
    run = Run(window=window, group_size=group_size, source=source)
    room, order, owners = 2 * group_size, [], {}
    for _ in range(20):
      batch = run.collect().batch.responses.rollout
      assert len(batch.lengths) == room
      fresh = batch.window_start == 0
      order += batch.sample_id[fresh].tolist()
      owners |= dict(zip(ids_of(batch), batch.example_id.tolist()))
      assert len(waiting_ids(run)) < group_size
    # Ids are consecutive, however many calls there were.
    assert order + waiting_ids(run) == list(range(run.state.samples))
    assert all(owners[i] == 3 * (i // group_size) for i in order)

  def test_only_what_ended_is_judged_and_against_its_own_prompt(self):
    run = Run(window=2)
    for _ in range(6):
      before = len(run.pool.seen)
      batch = run.collect().batch.responses
      over = batch.ended
      seen = run.pool.seen[before:]
      examples = batch.rollout.example_id[over].tolist()
      assert [i for i, _ in seen] == batch.rollout.sample_id[over].tolist()
      assert [a for _, a in seen] == [f"answer {e}" for e in examples]
      assert not batch.correct[~over].any() and not batch.rewards[~over].any()
      assert batch.correct[over].tolist() == [i % 2 == 0 for i, _ in seen]


SCHEDULES = [
  {},
  {"window": 2},
  {"window": 2, "stop": "first_groups", "in_flight": 3},
  {"stop": "first_groups", "in_flight": 4},
  {"dynamic_sampling": True, "in_flight": 4, "max_rounds": 9},
  {
    "stop": "first_groups",
    "dynamic_sampling": True,
    "in_flight": 4,
    "max_staleness": 2,
    "max_rounds": 9,
  },
]


def schedule_name(settings):
  return "-".join(settings) or "plain"


class TestState:
  """Everything that a worker keeps outside its state is a cache."""

  @pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)
  def test_a_new_worker_goes_on_as_the_old_one(self, settings):
    right = lambda i: i % 7 in (0, 1, 2)
    source = Source(lambda position: position // 2)  # Each drawn twice.
    runs = [Run(right=right, source=source, **settings) for _ in range(2)]
    for _ in range(8):
      runs[1].renew()
      one, other = (run.collect() for run in runs)
      chex.assert_trees_all_equal(one.batch, other.batch)
      chex.assert_trees_all_equal(one.state.store, other.state.store)
      assert [x.texts for x in one.judged] == [x.texts for x in other.judged]
    assert runs[0].pool.seen == runs[1].pool.seen


class TestMaxStaleness:
  def test_an_ended_response_ages_its_group(self):
    # Response 2 ends in the first step, before response 3 has a slot. The next
    # one waits for response 3, and for no other.
    lengths = [1, 1, 1, 4, 6] + [1] * 10
    run = Run(
      stop="first_groups",
      groups=1,
      group_size=2,
      in_flight=2,
      max_staleness=1,
      slots=3,
      lengths=lengths.__getitem__,
    )
    for version, groups in enumerate([[0], [1], [2]]):
      rollout = run.collect().batch.responses.rollout
      assert np.unique(rollout.group_id).tolist() == groups
      assert (version - rollout.version[rollout.mask]).max() <= 1
      assert version != 1 or run.state.store.lengths.max() == 4

  def test_complete_groups_of_the_step_before_suffice(self):
    how = {"stop": "first_groups", "groups": 1, "in_flight": 2}
    run = Run(lengths=lambda i: 1, max_staleness=2, **how)
    run.collect()
    written = run.engine.stats.tokens
    rollout = run.collect().batch.responses.rollout
    assert np.unique(rollout.group_id).tolist() == [1]
    assert run.engine.stats.tokens == written

  def test_more_groups_in_flight_need_more(self):
    message = "5 groups in flight and 2 per batch: use 2 or more"
    with pytest.raises(ValueError, match=message):
      Run(stop="first_groups", in_flight=5, max_staleness=1)


class TestOwnRule:
  @pytest.mark.parametrize("ended", [0, 1])
  def test_one_that_halts_early_is_named(self, ended, monkeypatch):
    rule = lambda missing, awaited: sampling.stop_after_groups(ended)
    stop = schedule.Stop(groups=rule, responses=None)
    monkeypatch.setitem(schedule.STOPS, "early", stop)
    message = f"returned when {ended} of 2 groups had ended"
    # The responses of the first group end at once.
    run = Run(stop="early", lengths=lambda i: 1 if i < 4 else LIMIT)
    with pytest.raises(InputError, match=message):
      run.collect()


class TestEachOnce:
  """Each response that was begun is returned once or still in flight."""

  WRONG = {
    "lost": lambda rollout: take_rows(rollout, np.s_[1:]),
    "doubled": lambda rollout: take_rows(
      rollout, [0, *range(len(rollout.lengths))]
    ),
    "copied": lambda rollout: take_rows(
      rollout, [0, 0, *range(2, len(rollout.lengths))]
    ),
  }

  @pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)
  @pytest.mark.parametrize("how", WRONG)
  def test_anything_else_is_refused(self, settings, how):
    run = Run(right=lambda i: i % 7 in (0, 1, 2), **settings)
    run.collect()
    write = run.engine.generate_window
    run.engine.generate_window = lambda *args, **kwargs: self.WRONG[how](
      write(*args, **kwargs)
    )
    with pytest.raises(RuntimeError, match="responses were begun, but"):
      for _ in range(3):
        run.collect()


class TestDrawnTwice:
  """A prompt that is drawn again while in flight forms another group."""

  @pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)
  def test_is_two_groups(self, settings):
    source = Source(lambda position: 5)  # The same example again and again.
    run = Run(source=source, **settings)
    for _ in range(5):
      rollout = run.collect().batch.responses.rollout
      assert (rollout.example_id == 5).all()
      np.testing.assert_array_equal(rollout.group_id, rollout.sample_id // 4)
      group = group_index(rollout.group_id)
      np.testing.assert_array_equal(rollout.group, group)
      if "window" not in settings:  # Some have no slot yet.
        assert (np.bincount(group) == 4).all()
    assert rollout.group_id.max() > 2
    assert {answer for _, answer in run.pool.seen} == {"answer 5"}


class TestDynamicSampling:
  @pytest.mark.parametrize("stop", ["all", "first_groups"])
  def test_a_batch_has_mixed_groups_and_the_others_are_lost(self, stop):
    right = lambda i: i % 11 == 0
    how = {"dynamic_sampling": True, "max_rounds": 9, "max_staleness": 4}
    run = Run(right=right, stop=stop, in_flight=4, **how)
    trained, rounds = [], set()
    for _ in range(6):
      batch = run.collect().batch
      rounds.add(batch.metrics["rollout/rounds"])
      assert np.bincount(batch.responses.rollout.group).tolist() == [4, 4]
      assert mixed(batch.responses).all() and batch.responses.ended.all()
      trained += ids_of(batch.responses)
    assert len(rounds) > 1 and len(set(trained)) == len(trained)
    kept = ids_of(run.state.store)
    lost = set(range(run.state.samples)) - {*trained, *kept}
    group = lambda i: {right(i // 4 * 4 + k) for k in range(4)}
    alike = {i for i in lost if len(group(i)) == 1}
    assert alike and (stop == "all" or lost == alike)

  def test_mixed_groups_alone_are_as_without_it(self):
    one, other = (
      Run(dynamic_sampling=on, max_rounds=2).collect() for on in (True, False)
    )
    chex.assert_trees_all_equal(one.batch.responses, other.batch.responses)
    assert one.source_state == other.source_state
    assert one.state == other.state and one.state.store is None

  def test_gives_up_with_the_numbers(self):
    run = Run(right=lambda i: True, dynamic_sampling=True, max_rounds=3)
    with pytest.raises(
      TrainingStopped, match="^3 rounds judged 6 groups, but only 0 of the 2"
    ):
      run.collect()

  def test_tokens_of_all_rounds_are_counted(self):
    # All of group 0 are equal, the others are mixed.
    run = Run(
      right=lambda i: i < 4 or i % 2 == 0, dynamic_sampling=True, max_rounds=3
    )
    row = run.collect().batch.metrics
    assert row["rollout/rounds"] == 2
    assert row["rollout/tokens"] == sum(map(length_of, range(16)))
    # Round two has one group too many, which is discarded.
    assert row["reward/accuracy"] == 10 / 16
    assert row["rollout/solved_all"] == 0.25
    lengths = list(map(length_of, range(16)))
    assert row["rollout/response_length_mean"] == np.mean(lengths)

  @pytest.mark.parametrize(
    ("stop", "accuracy", "surplus", "second"),
    [
      # All four groups are judged in this step, or the two that are returned.
      ("all", 0.375, [], [*range(16, 24)]),
      ("first_groups", 0.25, [*range(8, 16)], [*range(8, 16)]),
    ],
  )
  def test_surplus_waits_only_where_responses_may_be_stale(
    self, stop, accuracy, surplus, second
  ):
    # All end at once, so that there is a surplus of two groups.
    run = Run(
      stop=stop,
      dynamic_sampling=True,
      in_flight=4,
      max_rounds=3,
      max_staleness=2,
      lengths=lambda i: 2,
      right=lambda i: i % 4 < 1 + (i >= 8),
    )
    row = run.collect().batch.metrics
    assert row["rollout/mixed_fraction"] == 1 and row["rollout/tokens"] == 32
    assert row["reward/accuracy"] == accuracy
    assert ids_of(run.state.store) == surplus
    assert ids_of(run.collect().batch.responses) == second


class TestMixed:
  def make(self, groups, correct):
    rollout = tiny_run.random_rollout(
      np.random.default_rng(0), rows=len(groups)
    ).replace(group=np.asarray(groups, np.int32))
    return unjudged(rollout).replace(correct=np.asarray(correct, bool))

  def test_by_hand(self):
    # Group 0 is mixed, 1 all correct, 2 all wrong; 3 has one row.
    responses = self.make([0, 1, 2, 0, 1, 2, 3, 0], [1, 1, 0, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(mixed(responses), [1, 0, 0, 1, 0, 0, 0, 1])

  def test_without_a_verdict_nothing_is_right_or_wrong(self):
    responses = self.make([0, 0, 1, 1, 1, 2, 2], [1, 0, 1, 0, 0, 1, 0])
    judged = np.asarray([True, False, True, False, True, False, True])
    np.testing.assert_array_equal(
      mixed(responses.replace(judged=judged)), [0, 0, 1, 1, 1, 0, 0]
    )


def test_streams_of_randomness_differ():
  streams = (rollouts.ROLLOUTS, rollouts.EVALUATION, rollouts.PRETRAINING)
  keys = [run_key(0, stream) for stream in streams]
  assert len({str(key) for key in keys}) == 3
  assert run_key(1, rollouts.ROLLOUTS) != keys[0]
