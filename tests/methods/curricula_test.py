"""Prompt sources of methods: golden values and common invariants."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from helpers import doors
from helpers.tiny_algorithm import make_algorithm, make_rollout

from jaxrl_llm import metrics, register, rewards
from jaxrl_llm.data import oracles, prompt_source, tasks
from jaxrl_llm.data.sources import LazySource
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.methods import (
  adhint,
  dars,
  dps,
  gdro,
  majority,
  nudge,
  sgpo,
  xrpo,
)
from jaxrl_llm.rewards.judge import Judged
from jaxrl_llm.trainer import build, data
from jaxrl_llm.types import Responses, Status, join_rows, take_rows

POOL, TRIES = 12, 4


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
  """A profile of the pool with rates from 0 to 1."""
  source, file = pool(), tmp_path_factory.mktemp("profile") / "set.jsonl"
  lines = [
    {"question": source[i].question, "correct": i % 9, "samples": 8}
    for i in range(POOL)
  ]
  file.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return file


def pool():
  task = tasks.ChainSum(max_ops=3)
  return LazySource(task.__getitem__, range(POOL))


def make(name, model, settings=None, **changes):
  """Makes the prompt source of a method, with its settings, over the pool."""
  own = {f"method__{name}__{key}": x for key, x in (settings or {}).items()}
  made = make_algorithm(estimator__name="group", method__use=(name,), **own)
  tokenizer = Tokenizer(str(model))
  arguments = {
    "seed": 3,
    "template": prompt_source.completion(tokenizer),
    "tokenizer": tokenizer,
    "max_prompt_length": 16,
  }
  if name in ("adhint", "scope"):
    arguments["max_response_length"] = 40
  if name == "gdro":
    arguments["group_size"] = TRIES
  return made.prompts(pool(), **arguments | made.prompt_settings | changes)


def answers(source, prompts, right, judged=True):
  """Makes responses, `right` of them correct for each prompt."""
  ids = [p.example_id for p in prompts for _ in range(p.tries or TRIES)]
  groups = [p.group_id for p in prompts for _ in range(p.tries or TRIES)]
  place = [k for p in prompts for k in range(p.tries or TRIES)]
  rows = np.zeros(len(ids), int)
  rollout = take_rows(make_rollout(), rows).replace(
    example_id=np.array(ids, np.int32),
    group_id=np.array(groups, np.int32),
    sample_id=np.arange(len(ids), dtype=np.int32),
    status=np.full(len(ids), int(Status.FINISHED), np.int32),
  )
  correct = np.array(place) < right
  return Responses(
    rollout=rollout,
    rewards=correct.astype(np.float32),
    correct=correct,
    judged=np.full(len(ids), judged),
  )


CURRICULA = ("dots", "dps", "gdro", "sgpo", "nudge")


class TestLaws:
  """Invariants of every source in this file."""

  @pytest.fixture(params=CURRICULA)
  def source(self, request, model, profile):
    settings = {
      "sgpo": {"profile": str(profile)},
      "nudge": {"contexts": ("", "0+")},
    }
    return make(request.param, model, settings.get(request.param))

  def walk(self, source, state, steps, n=5):
    drawn = []
    for step in range(steps):
      prompts, state = source.draw(state, n)
      drawn.append(prompts)
      state = source.observe(state, answers(source, prompts, right=step % 5))
    return drawn, state

  def test_draws_depend_on_the_state_alone(self, source):
    first, middle = self.walk(source, source.init(), 4)
    assert self.walk(source, source.init(), 4)[0] == first
    ids = [prompt.group_id for prompts in first for prompt in prompts]
    assert ids == list(range(20)) and middle.drawn == 20
    # As in a checkpoint in the middle of an epoch.
    copied = jax.tree.map(lambda x: np.asarray(x).copy(), middle)
    copied = dataclasses.replace(copied, drawn=int(copied.drawn))
    assert self.walk(source, copied, 3)[0] == self.walk(source, middle, 3)[0]

  def test_no_prompt_starves(self, source):
    drawn, _ = self.walk(source, source.init(), 100)
    asked = {prompt.example_id for prompts in drawn for prompt in prompts}
    left_out = getattr(source, "_rates", np.zeros(0))
    easy = np.flatnonzero((left_out == 0) | (left_out > 0.75))
    assert asked >= set(range(POOL)) - set(easy.tolist())

  def test_unjudged_responses_teach_nothing(self, source):
    prompts, state = source.draw(source.init(), 5)
    given_up = answers(source, prompts, right=2)
    stopped = np.full(len(given_up.rewards), int(Status.STOPPED), np.int32)
    given_up = given_up.replace(
      rollout=given_up.rollout.replace(status=stopped)
    )
    failed = answers(source, prompts, right=2, judged=False)
    for responses in (failed, given_up):
      after = source.observe(state, responses)
      jax.tree.map(np.testing.assert_array_equal, after, state)


def test_an_endless_source_gets_a_pool(model):
  make = functools.partial(doors.make_config, model, method__use=("dps",))
  one, other = (build.make_run(make(run__seed=i)).source for i in (0, 1))
  assert len(one) == len(other) == 1024
  assert all(one.example(i, 0) == other.example(i, 0) for i in range(9))
  assert one.draw(one.init(), 9)[0] != other.draw(other.init(), 9)[0]
  assert len(build.make_run(make(data__pool=2000)).source) == 2000
  with pytest.raises(InputError, match="at most 10,000,000 prompts; set"):
    build.make_run(make(data__pool=20_000_000))


def test_a_file_is_read_whole(tmp_path, model):
  rows = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(1100)]
  (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
  config = doors.make_config(
    model,
    method__use=("dps",),
    data__source="jsonl",
    data__path=str(tmp_path / "sums.jsonl"),
    data__settings={},
    data__holdout=0.0,
    data__on_long="drop",
  )
  assert len(build.make_run(config).source) == 1100


def test_a_curriculum_alone_refuses_data_without_an_end(model):
  register.prompt_source("made", lambda *a, **k: dps.Dps(*a, **k))
  with pytest.raises(InputError, match=r"set config\.data\.pool"):
    build.make_run(doors.make_config(model, data__order="made"))


@pytest.mark.parametrize(
  ("key", "value", "needed"),
  [
    ("schedule__stop", "first_groups", "'all'"),
    ("schedule__window", 4, "0"),
    ("schedule__streaming", True, "False"),
  ],
)
def test_asking_again_needs_whole_batches(model, key, value, needed):
  changes = {
    "method__use": ("dars",),
    "optimizer__policy__mini_batch": 16,
    "estimator__name": "gae" if key == "schedule__window" else "group",
    "estimator__normalize": "none",
    "loss__overlong_filter": False,
    key: value,
  }
  key = key.replace("__", ".")
  said = rf"config.method.use=.'dars',. with config.{key}=.* use {key}={needed}"
  with pytest.raises(InputError, match=said):
    build.make_run(doors.make_config(model, **changes))


def test_a_pool_of_long_prompts_is_refused(model):
  source = make("dps", model, max_prompt_length=2, on_long="drop")
  with pytest.raises(InputError, match="all prompts are longer"):
    source.draw(source.init(), 3)


class TestTargetRate:
  """Tests of DOTS."""

  def test_prefers_what_is_solved_half_of_the_time(self, model):
    source = make("dots", model, {"explore": 0.0})
    rate = np.where(np.arange(POOL) % 2, 0.5, 1.0).astype(np.float32)
    counts = np.zeros(POOL)
    for draw in range(400):
      state = source.init().replace(drawn=draw, rate=rate)
      prompts, _ = source.draw(state, 1)
      counts[prompts[0].example_id] += 1
    # p = exp(-5) / (1 + exp(-5)) for one half of the pool.
    assert counts[::2].sum() <= 12

  def test_rates_move_halfway(self, model):
    source = make("dots", model)
    prompts, state = source.draw(source.init(), 2)
    after = source.observe(state, answers(source, prompts, right=4))
    seen = [p.example_id for p in prompts]
    np.testing.assert_allclose(after.rate[seen], 0.75)
    assert np.sum(after.rate != 0.5) == 2


def test_dps_by_hand():
  belief, counts = np.full((1, 3), 1 / 3), np.ones((3, 3))
  priors = []
  for outcome in (1, 1, 2):
    priors.append(belief @ (counts / counts.sum(0)).T)
    belief, counts = dps.transition(
      belief, counts, np.array([0]), np.array([outcome])
    )
  priors.append(belief @ (counts / counts.sum(0)).T)
  np.testing.assert_allclose(
    np.concatenate(priors),
    [
      [0.3333, 0.3333, 0.3333],
      [0.3, 0.4, 0.3],
      [0.2362, 0.5276, 0.2362],
      [0.3161, 0.3678, 0.3161],
    ],
    atol=1e-4,
  )
  np.testing.assert_allclose(
    counts[1:], [[1.1633, 1.8633, 1.1633], [1, 2, 1]], atol=1e-4
  )


def test_dps_prefers_groups_that_were_mixed(model):
  source = make("dps", model, {"explore": 0.0})
  prompts, state = source.draw(source.init(), 6)
  seen = [
    answers(source, prompts[2 * k : 2 * k + 2], right)
    for k, right in enumerate((0, 1, TRIES))
  ]
  for _ in range(2):  # The first transition is from unknown states.
    state = source.observe(state, join_rows(seen))
  again, _ = source.draw(state, 2)
  mixed = {prompt.example_id for prompt in prompts[2:4]}
  assert {prompt.example_id for prompt in again} == mixed


@pytest.mark.parametrize(
  ("signal", "n", "expected"),
  [
    ("equal", 8, [24, 11, 3, 1, 0, 0]),
    ("hard", 8, [56, 24, 8, 3, 0, 0]),
    ("equal", 4, [6, 2, 0, 0]),
  ],
)
def test_dars_tries(signal, n, expected):
  found = [dars.more_tries(right, n, signal) for right in range(len(expected))]
  assert found == expected


class TestGdro:
  """Tests of weights by square roots of variances."""

  def test_by_hand(self):
    # In proportion, they are 2.81, 6.28, 8.88 and 14.04.
    deviations = np.sqrt([0.01, 0.05, 0.1, 0.25])
    given = gdro.apportion(deviations, 32, fewest=2, most=32)
    assert given.tolist() == [3, 6, 9, 14]
    bounded = gdro.apportion(np.array([1e-6, 1.0, 1.0]), 15, fewest=2, most=6)
    assert bounded.tolist() == [3, 6, 6]

  def test_variances_and_tries_by_hand(self, model):
    source = make("gdro", model, group_size=6)
    prompts, state = source.draw(source.init(), 2)
    after = source.observe(state, answers(source, prompts, right=1))
    # Halfway from 1/4 to 6/5 · 1/6 · 5/6, in the bin of the rate before, 1/2.
    expected = np.where(np.arange(10) == 5, 0.2083, 0.25)
    np.testing.assert_allclose(after.variance, expected, atol=1e-4)
    single = [dataclasses.replace(prompt, tries=1) for prompt in prompts]
    after = source.observe(state, answers(source, single, right=1))
    np.testing.assert_array_equal(after.variance, state.variance)
    rate = np.where(np.arange(POOL) % 2, 0.5, 0.05).astype(np.float32)
    variance = np.where(np.arange(10) == 5, 1 / 4, 1 / 36)
    prompts, _ = source.draw(state.replace(rate=rate, variance=variance), POOL)
    # Standard deviations of 1/2 and 1/6.
    tries = {prompt.example_id: prompt.tries for prompt in prompts}
    assert tries == {i: 9 if i % 2 else 3 for i in range(POOL)}


class TestSgpo:
  """Tests of the order by a profile."""

  def test_tries(self):
    rates = [0, *(k / 8 for k in range(1, 7))]
    assert [sgpo.tries_of(p) for p in rates] == [8, 8, 4, 4, 2, 2, 2]

  def test_order(self):
    rates = np.array([0.0] * 20 + [1.0, 0.8, 0.75, 0.5, 0.5, 0.25, 0.125])
    order = sgpo.order_of(rates, np.random.default_rng(0))
    kept = rates[order]
    assert len(order) == 7 and (kept == 0).sum() == 2
    assert sorted(kept[:3]) == [0.5, 0.5, 0.75] and set(kept[5:]) == {0.0}

  def test_a_question_without_a_line_is_named(self, model, tmp_path):
    file = tmp_path / "few.jsonl"
    file.write_text('{"question": "1+1?", "correct": 1, "samples": 2}\n')
    with pytest.raises(InputError, match=r"no line for .* \(12 of 12"):
      make("sgpo", model, {"profile": str(file)})
    file.write_text('{"question": "1+1?", "correct": 1, "samples": 0}\n')
    with pytest.raises(InputError, match=r"few.jsonl:1: not a line of a"):
      make("sgpo", model, {"profile": str(file)})


def test_majority_by_hand():
  verdicts = [rewards.Verdict(False, x) for x in ("12", "12", "15", None)]
  assert majority.has_majority([""] * 4, verdicts) == [True, True, False, False]
  none = [rewards.Verdict(False)] * 2
  assert majority.has_majority([""] * 2, none) == [False, False]
  tied = [rewards.Verdict(False, x) for x in ("7", "5", "5", "7")]
  assert majority.has_majority([""] * 4, tied) == [True, False, False, True]


class TestHints:
  """Tests of ADHint."""

  def test_share(self, model):
    source = make("adhint", model)
    found = [source.share(p) for p in (0, 0.25, 0.5, 0.75, 1)]
    np.testing.assert_allclose(found, [0.8, 0.6, 0.4, 0.2, 0])

  def test_hard_prompts_come_again_with_a_part_of_their_solution(self, model):
    source = make("adhint", model)
    prompts, state = source.draw(source.init(), 3)
    given = answers(source, prompts, right=1)
    given.correct[TRIES : 2 * TRIES] = True
    again, after = source.again(state, Judged(given, [], [], []))
    hard = sorted([prompts[0].example_id, prompts[2].example_id])
    assert [prompt.example_id for prompt in again] == hard
    assert [prompt.group_id for prompt in again] == [3, 4] and after.drawn == 5
    for prompt in again:
      text = make("adhint", model)._tokenizer.decode(prompt.opening)
      assert text == prompt.completion[: int(0.6 * len(prompt.completion))]

  def test_factor(self):
    foreign = np.array([[0], [0], [0], [0], [1], [1], [1], [1], [1]])
    correct = np.array([1, 0, 0, 0, 1, 1, 1, 0, 0], bool)
    judged = np.arange(9) < 8
    rewards_ = correct.astype(np.float32)
    means = np.repeat(rewards_[:8].reshape(2, 4).mean(1), 4)
    advantages = np.append(rewards_[:8] - means, 0)[:, None]
    found = adhint.hinted(advantages, foreign, correct, judged)
    # 1 + 0.75 - 0.25 for the effect of a hint.
    expected = [0.75 * 1.5, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75 * 1.5]
    np.testing.assert_allclose(found[:8, 0], expected, atol=1e-6)


class TestRepairs:
  """Tests of SCOPE."""

  EXAMPLE = tasks.Example(
    "x", "7+5+8-3?", "17", "", completion="7+5=12;12+8=20;20-3=17;#17."
  )

  @pytest.mark.parametrize(
    ("text", "found"),
    [
      ("7+5=12;12+8=21;21-3=18;#18.", ("7+5=12;", "12+8=20;")),
      ("7+5=13;", ("", "7+5=12;")),
      ("7+5=12;12", ("7+5=12;", "12+8=20;")),
      ("7+5=12;12+8=20;20-3=17;#18.", None),
    ],
  )
  def test_first_wrong_line(self, text, found):
    assert oracles.first_wrong_line(self.EXAMPLE, text) == found

  def test_at_most_half_of_a_group_is_repaired(self, model):
    source = make("scope", model)
    prompts, state = source.draw(source.init(), 2)
    given = answers(source, prompts, right=1)
    asked = [prompt for prompt in prompts for _ in range(TRIES)]
    texts = ["1"] * len(asked)
    judged = Judged(given, asked, texts, [])
    again, _ = source.again(state, judged)
    assert len(again) == 4 and all(prompt.tries == 1 for prompt in again)
    first = again[0].completion.partition(";")[0] + ";"
    assert source._tokenizer.decode(again[0].opening) == first

  def test_kept_tokens_are_those_of_the_policy(self, model):
    """The opening of a response is not tokenized again."""
    source = make("scope", model)

    class Pairs:
      """Decodes two characters per token, but encodes single ones."""

      def decode(self, tokens):
        return "".join(tokens)

      def continued(self, text):
        return list(text)

    source._tokenizer = Pairs()
    written = ["7+", "5=", "12", ";1", "2+", "8=", "21", ";"]
    opening = source._opening(written, "7+5=12;", "12+8=20;")
    assert opening == ("7+", "5=", "12", *";12+8=20;")


def test_all_draws_of_a_prompt_share_a_baseline():
  """Case: the last response has no verdict."""
  rewards_ = np.array([1, 0, 0, 1, 5], np.float32)[:, None]
  judged, ids = np.arange(5) < 4, np.array([7, 7, 7, 8, 7])
  found = dars.by_example(rewards_, np.ones((5, 1), bool), ids, judged)
  expected = [2 / 3, -1 / 3, -1 / 3, 0]
  np.testing.assert_allclose(found[:4, 0], expected, atol=1e-6)


def test_novelty_by_hand():
  logprobs = np.array([-1.0, -3.0, -3.0, -1.0], np.float32)[:, None]
  advantages = np.array([0.5, 0.5, 0.2, -0.5], np.float32)[:, None]
  found = xrpo.sharpened(
    advantages,
    np.arange(4) < 2,
    np.ones((4, 1), bool),
    np.zeros(4, int),
    logprobs,
  )
  # Scores minus their mean of -2: 1, -1, -1, 1; 1 - exp(-1) exceeds A = 0.5.
  # An incorrect response gets none, even if its advantage is positive.
  np.testing.assert_allclose(found[:, 0], [0.5, 1.0, 0.2, -0.5], atol=1e-6)


def test_questions_too_long_in_one_context_are_dropped_in_all(model):
  limits = {"max_prompt_length": 8, "on_long": "drop"}
  source = make("nudge", model, {"contexts": ("", "0+0+")}, **limits)
  prompts, _ = source.draw(source.init(), 2 * POOL)
  lengths = [len(prompt.tokens) for prompt in prompts]
  assert len(prompts) == 2 * POOL and max(lengths) <= 8
  # Equal numbers per context; some questions would only fit without context.
  assert lengths[1::2] == [length + 4 for length in lengths[::2]]
  without = make("nudge", model, {"contexts": ("",)}, on_long="drop")
  shorter, _ = without.draw(without.init(), POOL)
  assert max(len(prompt.tokens) for prompt in shorter) > max(lengths[::2])


def test_inter_intra_by_hand():
  token_rewards = np.array([1, 0, 1, 1, 0, 0, 0], np.float32)[:, None]
  found = nudge.inter_intra(
    token_rewards,
    np.ones((7, 1), bool),
    np.array([0, 0, 1, 1, 2, 2, 7]),  # The last response is not judged.
    np.array([5, 5, 5, 5, 9, 9, 5]),
    np.arange(7) < 6,
    between=2.0,
  )
  # Means: 0.5 and 1.0 for the contexts, 0.75 for the prompt.
  expected = [0.0, -1.0, 0.5, 0.5, 0.0, 0.0]
  np.testing.assert_allclose(found[:6, 0], expected, atol=1e-6)


RUNS = {
  "dots": {"data__pool": 12, "method__use": ("xrpo", "dots")},
  "dps": {"data__pool": 12},
  "gdro": {"data__pool": 12},
  "dars": {},
  "adhint": {},
  "scope": {},
  "nudge": {
    "method__nudge__contexts": ("", "0+"),
    "data__max_prompt_length": 16,
  },
}


# Each source is in one of the two runs, with all that it does in a step.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gdro", "dars", "adhint", "nudge"])
def test_meets_an_environment_and_dynamic_sampling(model, tmp_path, name):
  register.reward("even", lambda tokens: sum(tokens) % 2 == 0)
  features = {
    "schedule__dynamic_sampling": True,
    "schedule__over_provision": 2.0,
    "schedule__max_rounds": 8,
    "reward__name": "even",
    "environment__name": "calculator",
    "sampler__stop": ("=",),
    "environment__max_turns": 3,
  }
  changes = {"method__use": (name,)} | RUNS[name] | features
  doors.train(model, tmp_path / "run", **changes)


@pytest.mark.slow
def test_a_profile_trains(model, tmp_path):
  task, file = tasks.ChainSum(max_ops=2), tmp_path / "profile.jsonl"
  lines = [
    {"question": task[i].question, "correct": 4 * (i % 2), "samples": 8}
    for i in range(POOL)
  ]
  file.write_text("".join(json.dumps(line) + "\n" for line in lines))
  settings = {"method__use": ("sgpo",), "method__sgpo__profile": str(file)}
  with pytest.raises(InputError, match=r"set config\.data\.pool"):
    build.make_run(doors.make_config(model, **settings))
  settings["data__pool"] = POOL
  rows = doors.train(model, tmp_path / "run", **settings)
  assert rows[1]["rollout/tokens"] > 0
  # A resume reports a different profile.
  config = doors.make_config(model, **settings)
  before = data.digests(config)
  file.write_text(2 * file.read_text())
  changed = {k for k, x in data.digests(config).items() if x != before[k]}
  assert changed == {"method"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dots", "dps", "scope"])
def test_trains_and_resumes_with_majority_labels_and_replay(
  model, tmp_path, name
):
  changes = RUNS[name] | {
    "sampler__max_response_length": 24,
    "run__samples_every": 1,
    "schedule__replay": 0.5,
    "schedule__replay_keep": "all",
  }
  changes["method__use"] = (*changes.get("method__use", (name,)), "majority")
  rows = doors.train(model, tmp_path / "run", **changes)
  for row in rows[1:]:
    assert ("rollout/again" in row) == (name == "scope")
    assert row["sampler_trainer/logprob_diff_max"] < 1e-5
    assert 0 <= row["reward/agrees"] <= 1 and "reward/true" in row
  if name == "scope":
    samples = metrics.read_rows(tmp_path / "run" / "samples.jsonl")
    given = [s for s in samples if s["step"] and s["origin"][0][0] == "given"]
    assert given and all(s["advantage"][0] is None for s in given)
