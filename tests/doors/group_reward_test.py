"""Rewards that compare the responses to a prompt, such as majority labels."""

import contextlib
import dataclasses
import sys
from unittest import mock

import numpy as np
import pytest
from helpers import cases, doors, tiny_run

from jaxrl_llm import register, rewards
from jaxrl_llm.rewards.adapters import Comparison
from jaxrl_llm.system import plugin
from jaxrl_llm.trainer import build, loop

_PROGRAMS = cases.load("code")

LABELS = {"method__use": ("majority",)}


def test_has_the_time_and_the_process_of_a_reward(tmp_path, monkeypatch):
  monkeypatch.setattr("sys.path", list(sys.path))
  (tmp_path / "own_longest.py").write_text(_PROGRAMS["group_reward_own"])
  fn = plugin.load(str(tmp_path / "own_longest.py")).longest
  right = dataclasses.astuple(rewards.Verdict(True))
  calls = [
    {"texts": text, "verdicts": right, "group": i % 2, "columns": {}}
    for i, text in enumerate(["a", "bb", "hang", "b"])
  ]
  with contextlib.closing(
    rewards.RewardPool(Comparison(fn), workers=2, deadline_s=0.5)
  ) as pool:
    found = pool.judge(calls)
  assert [(v.correct, v.error) for v in found] == [
    (False, "timeout"),
    (True, None),
    (False, "timeout"),
    (False, None),
  ]


@pytest.mark.parametrize("streaming", [False, True])
def test_labels_train_and_never_evaluate(model, tmp_path, streaming):
  rows = doors.train(
    model,
    tmp_path / "run",
    **LABELS,
    schedule__streaming=streaming,
    optimizer__policy__mini_batch=16,
  )
  plain = build.make_run(doors.make_config(model))
  first = loop.evaluate(plain, *loop.begin(plain), mock.Mock())
  for row in rows[1:]:
    # Random digits are rarely correct, but one answer is its group's label.
    assert row["reward/true"] < row["reward/accuracy"]
    assert row["reward/mean"] == pytest.approx(2 * row["reward/accuracy"] - 1)
    assert 0 <= row["reward/agrees"] < 1
  evaluated = [name for name in rows[0] if name.startswith("eval/")]
  assert evaluated and all(rows[0][k] == first[k] for k in evaluated)


def test_pretraining_and_training_share_its_processes(model):
  run = build.make_run(tiny_run.make_config(model, **LABELS))
  shared = run.worker.group_reward
  assert shared is not None and run.pretraining.worker.group_reward is shared


def test_a_failed_reward_is_still_reported(model):
  def broken(response):
    raise KeyError(response[:1])

  register.reward("broken", broken)
  run = build.make_run(
    doors.make_config(model, reward__name="broken", **LABELS)
  )
  *_, collected = tiny_run.collect(run)
  (sample,) = collected.new_failures
  assert "KeyError" in sample.error


def test_one_that_fails_leaves_its_group_unjudged(model, tmp_path):
  seen = []

  def picky(texts, verdicts):
    seen.append(texts)
    if len(seen) == 1:
      raise KeyError("oops")
    return [1.0] * (len(texts) + (len(seen) == 2))

  register.group_reward("picky", picky)
  run = build.make_run(doors.make_config(model, reward__group="picky"))
  told = []
  run.judge.tell = told.append
  *_, collected = tiny_run.collect(run)
  responses = collected.batch.responses
  np.testing.assert_array_equal(responses.judged, responses.rollout.group > 1)
  assert (responses.rewards[responses.judged] == 1).all() and len(seen) == 4
  agrees = responses.parts["agrees"]
  np.testing.assert_array_equal(np.isfinite(agrees), responses.judged)
  assert "KeyError: 'oops' (group_reward_test.py" in told[0]
  assert "return a list with a result for each of the 4 responses" in told[1]
