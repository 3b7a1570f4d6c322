"""Multi-turn responses are exact, without loss on observations."""

import dataclasses
import json

import chex
import numpy as np
import pytest
from helpers import chat_model, hostile, registries, tiny_run
from helpers.echo import Echo
from helpers.tiny_tppo import record

from jaxrl_llm import register
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.turns import EnvironmentCalls, make_conversation_config
from jaxrl_llm.rollout.writer import Weights
from jaxrl_llm.sampling import rules
from jaxrl_llm.trainer import build, data, loop
from jaxrl_llm.types import Origin, Status, ended, take_rows

STEPS = 4


class Paid(Echo):
  """Returns a reward component that grows with each turn and a constant."""

  def step(self, response):
    seen = super().step(response)
    parts = {"turn": self.state["said"] / 4, "fee": -1.0}
    return seen._replace(rewards=parts)


class NoStart(Echo):
  def start(self, example):
    return example.columns["how"]


@pytest.fixture(scope="module", autouse=True)
def registered():
  with registries.registered():
    register.environment("echo", Echo)
    register.environment("no_start", NoStart)
    register.environment("paid", Paid)
    register.environment("hostile", hostile.Hostile)
    yield


def make_run(model, **changes):
  settings = {
    "environment__name": "echo",
    "reward__name": "environment",
    "estimator__name": "group",
    "sampler__max_response_length": 40,
  }
  return tiny_run.make_run(model, **settings | changes)


@pytest.fixture(scope="module")
def run(model):
  return make_run(model)


@pytest.fixture(scope="module")
def history(run):
  return record(run, STEPS)


def is_foreign(rollout):
  """Returns tokens of the environment, bool [B, T]."""
  present = np.arange(rollout.mask.shape[1]) < rollout.lengths[:, None]
  return present & (rollout.origin == Origin.FOREIGN)


class TestTurns:
  def test_one_that_cannot_start_is_told_in_a_line(self, model):
    with pytest.raises(InputError, match="cannot start with .*'how'"):
      make_run(model, environment__name="no_start")

  def test_what_others_say_is_marked_and_carries_no_loss(self, history):
    steps, _ = history
    heard = 0
    for step in steps:
      rollout = step.collected.rollout
      present = np.arange(rollout.mask.shape[1]) < rollout.lengths[:, None]
      foreign = is_foreign(rollout)
      np.testing.assert_array_equal(rollout.mask, present & ~foreign)
      assert not rollout.behavior_logprobs[foreign].any()
      assert step.row["rollout/tokens"] == rollout.mask.sum()
      heard += foreign.sum()
    assert heard > 50

  def test_turns_end_where_the_environment_says(self, history):
    for step in history[0]:
      rollout = step.collected.rollout
      foreign = is_foreign(rollout)
      finished = rollout.status == Status.FINISHED
      assert (foreign.sum(axis=1)[finished] == 3).all()
      assert not step.after.rollout.conversations  # None is unfinished.
      assert set(rollout.status) <= {Status.FINISHED, Status.OVERLONG}
      rewards = step.collected.rewards
      np.testing.assert_array_equal(rewards[finished], 4.0)
      # The last observation may not have fitted.
      unheard = (rewards - foreign.sum(axis=1))[~finished]
      assert set(unheard) <= {0.0, 1.0}

  def test_in_windows_as_in_one_call(self, run):
    whole = talk(run)
    for window in (1, 5):
      assert_same_talks(talk(run, window), whole)

  def test_replies_that_come_after_the_end_of_a_call_are_kept(self, run):
    def halting(view):
      halt = view.awaiting_environment.any()
      return rules.continuous_batching(view)._replace(halt=halt)

    assert_same_talks(talk(run, rule=halting), talk(run))

  def test_an_observation_costs_its_own_tokens(self, run):
    engine = run.worker.writer.engine
    before, (rollout, _) = engine.stats, talk(run)
    engine_read = (engine.stats - before).prefill_tokens
    heard = int(is_foreign(rollout).sum())
    first = np.unique(rollout.group, return_index=True)[1]
    asked = int(rollout.prompt_lengths[first].sum())
    assert engine_read == asked + heard


def begin(run):
  """Returns initial weights, new conversations, and their table."""
  states, weights = loop.begin(run)
  writer = run.worker.writer
  prompts, _ = run.source.draw(states.source, 4)
  ids = np.arange(4 * writer.group_size).reshape(4, -1)
  table = writer.conversations(prompts, ids)
  return Weights(weights.params), writer.begin(prompts, ids), table


def talk(run, window=None, rule=rules.continuous_batching):
  """Generates conversations with the initial weights; returns them ended."""
  weights, rollout, table = begin(run)
  while (open_ := ~ended(rollout)).any():
    rows = np.flatnonzero(open_)
    part = run.worker.writer.write(
      take_rows(rollout, rows),
      weights,
      window=window,
      rule=rule,
      conversations=table,
    )
    one_call = window is None and rule is rules.continuous_batching
    assert not one_call or ended(part).all()
    new = np.arange(part.mask.shape[1]) >= part.window_start[:, None]
    assert window is None or (part.mask & new).sum(axis=1).max() <= window
    for name, column in part.replace(group=rollout.group[rows]).items():
      if column is not None:
        rollout[name][rows] = column
  rollout = rollout.replace(window_start=np.zeros_like(rollout.window_start))
  return rollout, {key: json.loads(value) for key, value in table.items()}


def assert_same_talks(mine, his):
  """Checks for equal tokens; after a cut, other programs read observations."""
  (rollout, talks), (other, others) = mine, his
  np.testing.assert_allclose(
    rollout.behavior_logprobs, other.behavior_logprobs, atol=1e-5
  )
  nothing = {"behavior_logprobs": np.zeros(0)}
  chex.assert_trees_all_equal(
    rollout.replace(**nothing), other.replace(**nothing)
  )
  assert talks == others


class TestTurnRewards:
  """Windows truncate most conversations."""

  @pytest.fixture(scope="class")
  def paid_history(self, model):
    run = make_run(
      model,
      environment__name="paid",
      environment__rewards="turns",
      reward__weights={"fee": 0.125},
      estimator__name="gae",
      schedule__window=6,
    )
    return record(run, 8)[0]

  def test_lie_where_turns_end(self, paid_history):
    cut = 0
    for step in paid_history:
      rollout = step.collected.rollout
      place = np.arange(rollout.mask.shape[1])
      present = place < rollout.lengths[:, None]
      foreign = is_foreign(rollout)
      ends = present & ~foreign & np.roll(foreign, -1, axis=1)
      finished = rollout.status == Status.FINISHED
      ends[finished, rollout.lengths[finished] - 1] = True
      turn = np.cumsum(ends, axis=1)
      paid = np.where(ends, turn / 4 - 0.125, 0)
      # The last observation of an overlong conversation may not have fitted.
      known = rollout.status != Status.OVERLONG
      np.testing.assert_array_equal(rollout.turn_rewards[known], paid[known])
      heard = place < rollout.lengths[:, None] - 1
      np.testing.assert_array_equal(
        (rollout.turn_rewards * heard)[~known], (paid * heard)[~known]
      )
      over = step.collected.ended
      np.testing.assert_array_equal(
        rollout.turn_rewards.sum(axis=1)[over], step.collected.rewards[over]
      )
      cut += int((rollout.turn_rewards.any(axis=1) & ~over).sum())
    assert cut > 20

  def test_of_a_turn_are_new_in_one_window(self, paid_history):
    given, checked = {}, 0
    for step in paid_history:
      rollout = step.collected.rollout
      place = np.arange(rollout.mask.shape[1])
      new = (place >= rollout.window_start[:, None]) & rollout.mask
      for row, number in enumerate(rollout.sample_id.tolist()):
        fresh = np.where(new[row], rollout.turn_rewards[row], 0)
        given[number] = given.get(number, 0) + fresh
        np.testing.assert_array_equal(given[number], rollout.turn_rewards[row])
        checked += bool(rollout.window_start[row] and fresh.any())
    assert checked > 20


class TestStopAfterResponses:
  COUNT = 10  # Of 16.

  def test_one_that_waits_for_an_answer_has_not_ended(self, run):
    seen = []

    def rule(view):
      decision = rules.stop_after_responses(self.COUNT)(view)
      seen.append((view, decision.halt))
      return decision

    weights, rollout, table = begin(run)
    rollout = run.worker.writer.write(
      rollout, weights, rule=rule, conversations=table
    )
    assert any(view.awaiting_environment.any() for view, _ in seen)
    for view, halted in seen:
      assert halted == (view.ended.sum() >= self.COUNT)
    over = ended(rollout)
    assert self.COUNT <= over.sum() < len(over)

  def test_a_resume_may_lower_the_number_of_turns(self, run):
    weights, rollout, table = begin(run)
    table = {
      key: json.dumps(json.loads(text) | {"turns": 10**6})
      for key, text in table.items()
    }
    rollout = run.worker.writer.write(rollout, weights, conversations=table)
    assert (rollout.status == Status.OVERLONG).all()


@pytest.fixture(scope="module")
def alone(model):
  """A run whose environment has one process and a short timeout."""
  return make_run(
    model,
    environment__name="hostile",
    environment__workers=1,
    environment__deadline_s=1.0,
    sampler__max_response_length=50,
  )


@pytest.mark.parametrize(
  "how",
  [
    # This waits until the process is killed.
    pytest.param("hang", marks=pytest.mark.slow),
    pytest.param("crash", marks=pytest.mark.slow),
    "fail",
    "flood",
    "broken_text",
  ],
)
def test_a_hostile_environment_loses_nothing(alone, how):
  config = alone.config.copy_and_resolve_references()
  config.environment.settings = {"how": how}
  conversation_config = data.make_conversation_config(config, alone.tokenizer)
  writer = dataclasses.replace(
    alone.worker.writer, turn_taking=conversation_config
  )
  worker = build.make_worker(
    config, writer, alone.source, alone.learner.algorithm
  )
  rollout, table = talk(dataclasses.replace(alone, worker=worker), None)
  conversation_config.call.close()
  assert ended(rollout).all()
  second = np.asarray([said["turns"] >= 2 for said in table.values()])
  failed = np.asarray(["failed" in said for said in table.values()])
  # Text outside a word-level vocabulary also ends the conversation.
  np.testing.assert_array_equal(failed, second & (how != "flood"))
  assert any(second)
  if how == "fail":  # The error names the line of the environment.
    errors = [said.get("failed", "hostile.py:") for said in table.values()]
    assert all("hostile.py:" in error for error in errors)
  for said, had in zip(table.values(), second):
    kept = how == "broken_text" and had
    assert said["rewards"] == ({"kept": 1.0} if kept else {})
  # They are not trained on.
  texts = {key: json.dumps(said) for key, said in table.items()}
  prompts = worker.prompts_of(rollout)
  judged = worker.writer.judge(rollout, prompts, texts)
  np.testing.assert_array_equal(judged.responses.judged, ~failed)


@pytest.mark.parametrize(
  "how",
  [
    *("silence", "numbers", "one_reward", "number_as_text", "no_role"),
    "no_json",
  ],
)
def test_what_is_no_observation_is_a_failure(how):
  calls = EnvironmentCalls(hostile.Hostile, {"how": how})
  with pytest.raises((TypeError, ValueError)):
    calls(state=1, response="?")


def test_a_long_observation_ends_as_a_short_one_does(tmp_path):
  tokenizer = Tokenizer(chat_model.write(tmp_path / "chat"))
  conversation_config = make_conversation_config(
    EnvironmentCalls(Echo, {}),
    tokenizer,
    "chat",
    {},
    workers=0,
    deadline_s=1.0,
    max_turns=9,
    max_observation_tokens=20,
  )
  read = lambda text: tokenizer.decode(
    conversation_config.observation(text, "tool"), skip_special=False
  )
  short = read("42")
  head, tail = short.split("42")
  assert head.endswith("tool: ") and tail.endswith("assistant: ")
  assert read("x" * 20) == f"{head}{'x' * 20}{tail}"
  for length in (21, 300, 10**6):
    assert read("x" * length) == f"{head}{'x' * 20} [cut]{tail}"
