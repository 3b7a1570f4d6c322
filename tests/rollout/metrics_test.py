"""Metrics of a batch of responses match results by hand."""

import numpy as np
from helpers import tiny_run

from jaxrl_llm.rollout.metrics import (
  conversation_metrics,
  decoding_metrics,
  rollout_metrics,
  source_metrics,
)
from jaxrl_llm.sampling import EngineStats
from jaxrl_llm.types import Status, take_rows, unjudged


def make_responses(status, **changes):
  """Makes four responses to two prompts with the given statuses."""
  rollout = tiny_run.random_rollout(
    np.random.default_rng(0), rows=4, group_size=2
  ).replace(
    lengths=np.asarray([4, 9, 2, 5], np.int32),
    prompt_lengths=np.asarray([3, 3, 2, 2], np.int32),
    window_start=np.asarray([0, 6, 0, 2], np.int32),
    status=np.asarray(status, np.int32),
  )
  return unjudged(rollout).replace(
    rewards=np.asarray([1.0, -1.0, -1.0, -1.0], np.float32),
    correct=np.asarray([True, False, False, False]),
    **changes,
  )


def test_decoding_counts_the_slots_that_a_pool_had():
  before = EngineStats(decode_steps=5, slot_steps=10, tokens=3)
  # 4 slots for 10 steps, then 1 for 20: 60 slot-steps, 45 of them with tokens.
  after = before + EngineStats(decode_steps=30, slot_steps=60, tokens=45)
  assert decoding_metrics(after - before) == {
    "rollout/tokens": 45,
    "rollout/decode_steps": 30,
    "rollout/idle_fraction": 0.25,
  }
  assert decoding_metrics(after - after) == {
    "rollout/tokens": 0,
    "rollout/decode_steps": 0,
  }


def report(batch):
  """Returns metrics of a batch in which all ended responses were judged."""
  over = take_rows(batch, batch.ended)
  return rollout_metrics(batch, over if batch.ended.any() else None)


ENDED = [Status.FINISHED, Status.OVERLONG, Status.FINISHED, Status.FINISHED]


class TestRolloutMetrics:
  def test_of_ended_responses(self):
    judged = np.asarray([True, True, True, False])
    row = report(make_responses(ENDED, judged=judged))
    # One of the three judged responses is correct.
    np.testing.assert_allclose(row["reward/mean"], -1 / 3, rtol=1e-6)
    np.testing.assert_allclose(row["reward/accuracy"], 1 / 3)
    np.testing.assert_allclose(row["reward/std"], np.sqrt(8 / 9), rtol=1e-6)
    assert row["reward/errors"] == 1
    assert row["rollout/response_length_mean"] == 5
    assert row["rollout/response_length_max"] == 9
    assert row["rollout/response_length_correct"] == 4
    assert row["rollout/response_length_incorrect"] == 5.5
    assert row["rollout/overlong_fraction"] == 0.25
    # One of two responses solved prompt 0, none solved prompt 1.
    assert row["rollout/solved_none"] == 0.5
    assert row["rollout/solved_all"] == 0
    assert row["rollout/zero_variance_groups"] == 0.5
    assert row["rollout/truncated_fraction"] == 0
    assert row["perf/tokens"] == 20 + 10

  def test_a_group_that_was_given_up_is_none(self):
    status = [Status.STOPPED, Status.STOPPED, Status.FINISHED, Status.FINISHED]
    batch = make_responses(status)
    row = rollout_metrics(batch, batch)
    assert row["rollout/stopped"] == 2
    assert row["rollout/solved_none"] == 1
    batch = batch.replace(rewards=np.arange(4, dtype=np.float32))
    row = rollout_metrics(batch, batch)
    assert row["rollout/zero_variance_groups"] == 0
    # Nor is one that dynamic sampling discarded.
    batch = batch.replace(judged=batch.ended)
    row = rollout_metrics(take_rows(batch, [2, 3]), batch)
    assert row["reward/errors"] == 0 and row["rollout/solved_none"] == 1
    assert row["rollout/response_length_mean"] == 3.5

  def test_parts_by_name(self):
    judged = np.asarray([True, True, True, False])
    nan, arrays = np.nan, np.asarray
    parts = {
      "format": arrays([1, nan, 0, 9]),
      "mean": arrays([2, 2, 2, 9]),
      "never": arrays([nan, nan, nan, 9]),
    }
    made = make_responses(ENDED, judged=judged).replace(parts=parts)
    row = report(made)
    assert row["reward/format"] == 0.5 and row["reward/mean_part"] == 2
    assert row["reward/mean"] < 0 and "reward/never" not in row

  def test_equal_rewards_have_no_variance_whatever_their_digits(self):
    made = make_responses(ENDED)
    same = made.replace(rewards=np.full(4, 0.37, np.float32))
    assert report(same)["rollout/zero_variance_groups"] == 1

  def test_nobody_was_judged(self):
    made = make_responses(ENDED, judged=np.zeros(4, bool))
    row = report(made)
    assert row["reward/errors"] == 4
    assert row["rollout/response_length_mean"] == 5
    absent = "reward/mean", "reward/accuracy", "rollout/solved_none"
    assert not {*absent, "rollout/response_length_incorrect"} & {*row}

  def test_what_has_not_ended_has_no_verdict(self):
    status = [Status.FINISHED, Status.TRUNCATED, Status.TRUNCATED, 0]
    row = report(make_responses(status))
    assert row["rollout/truncated_fraction"] == 0.5
    assert row["reward/mean"] == 0 and row["reward/accuracy"] == 0.5
    assert row["rollout/response_length_mean"] == 4.5
    assert "rollout/solved_none" not in row

  def test_nothing_has_ended(self):
    row = report(make_responses([Status.TRUNCATED] * 4))
    assert row["rollout/truncated_fraction"] == 1
    assert not any(name.startswith("reward/") for name in row)

  def test_nobody_was_right(self):
    responses = make_responses(ENDED).replace(correct=np.zeros(4, bool))
    row = report(responses)
    assert "rollout/response_length_correct" not in row
    assert row["rollout/response_length_incorrect"] == 5
    assert row["rollout/solved_none"] == 1

  def test_a_failed_reward_is_no_verdict_of_its_group(self):
    # A failed reward is that of an incorrect response.
    judged = np.asarray([True, False, True, True])
    row = report(make_responses(ENDED, judged=judged))
    assert row["rollout/response_length_incorrect"] == 3.5
    assert row["rollout/solved_all"] == row["rollout/solved_none"] == 0.5
    assert row["rollout/zero_variance_groups"] == 1

  def test_discarded_groups_count(self):
    whole = make_responses(ENDED)
    # The first group is trained on, the second is discarded.
    row = rollout_metrics(take_rows(whole, [0, 1]), whole)
    assert row["reward/accuracy"] == 0.25 and row["rollout/solved_none"] == 0.5
    assert row["rollout/zero_variance_groups"] == 0.5
    assert row["rollout/response_length_mean"] == 5
    assert row["perf/tokens"] == 4 + 9 + 3 + 3


def test_tokens_of_an_environment_are_told_apart():
  batch = make_responses(ENDED)
  mask = np.arange(9) < batch.rollout.lengths[:, None]
  mask[1, 3:7] = False
  batch = batch.replace(rollout=batch.rollout.replace(mask=mask))
  talks = {str(i): f'{{"turns": {1 + i % 2}}}' for i in range(4)}
  got = conversation_metrics(take_rows(batch, [0, 1]), talks)
  assert got == {
    "rollout/turns_mean": 1.5,
    "rollout/turns_max": 2,
    "rollout/observation_tokens_mean": 2,
  }


class TestSourceMetrics:
  def test_of_two_sources_by_hand(self):
    judged = np.asarray([True, True, True, False])
    responses = make_responses(ENDED, judged=judged)
    sources = {0: "a", 1: "openai/b", 2: "openai/b", 3: "openai/b"}
    row = source_metrics(responses, sources)
    assert row["reward/a/mean"] == 1 and row["reward/a/accuracy"] == 1
    # The last one was not judged, but has a length.
    assert row["reward/openai/b/mean"] == -1
    assert row["rollout/a/response_length_mean"] == 4
    assert row["rollout/openai/b/response_length_mean"] == 16 / 3

  def test_of_ended_responses_only(self):
    responses = make_responses([Status.STOPPED, *ENDED[1:]])
    row = source_metrics(responses, dict.fromkeys(range(4), "a"))
    np.testing.assert_allclose(row["rollout/a/response_length_mean"], 16 / 3)
    none = make_responses([Status.STOPPED] * 4)
    assert source_metrics(none, dict.fromkeys(range(4), "a")) == {}
