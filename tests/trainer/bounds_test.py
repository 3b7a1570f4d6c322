"""Settings that are sized for some rewards, with the rewards of a run."""

import types

import pytest
from helpers import registries, tiny_run

from jaxrl_llm import config as config_lib
from jaxrl_llm import metrics, register
from jaxrl_llm.learner import core
from jaxrl_llm.trainer import build, loop
from jaxrl_llm.trainer.bounds import bounds


def rules(method="ppo", support=None, **settings):
  config = config_lib.method(method, **tiny_run.dotted(settings))
  algorithm, critic = core.compose(config), None
  if algorithm.critic:
    head = types.SimpleNamespace(support=support)
    critic = types.SimpleNamespace(fns=types.SimpleNamespace(head=head))
  learner = types.SimpleNamespace(algorithm=algorithm, critic=critic)
  return bounds(config, learner)


def warned(rules, *rows):
  """Returns the warnings about rows of (accuracy, min, max) or (min, max)."""
  health, lines = metrics.Health(rules=rules), []
  for step, (*accuracy, low, high) in enumerate(rows):
    row = dict(zip(["reward/accuracy"], accuracy))
    for name in ("value/return_", "reward/"):
      row |= {f"{name}min": low, f"{name}max": high}
    lines += health.check(step, row)[1]
  return lines


def test_returns_beyond_the_bins():
  rule = rules(support=(-2.0, 2.0), loss__clip_value=None)
  assert not warned(rule, (-2, 2), (0.5, 1))
  for least, most in ((-2.5, 1), (0, 3), (-30, -20)):
    (line,) = warned(rule, (0, 1), (least, most), (least, most))
    assert f"value bins: the critic's targets are {least:g} to {most:g}" in line
    assert "its bins -2 to 2" in line and "with bins around them" in line


def test_returns_that_a_clip_cannot_follow():
  rule = rules(loss__clip_value=0.2)
  assert not warned(rule, (-1, 1), (0, 10))
  (line,) = warned(rule, (-1, 1), (0, 200))
  assert "0 to 200, but an update moves a value by at most 0.2" in line
  assert not warned(rules(loss__clip_value=None), (0, 200))


def test_rewards_on_one_side_of_the_threshold():
  rule = rules("grpo", reward__threshold=3.0)
  assert not warned(rule, *[(0.0, 1, 1)] * 5)  # Equal: another rule's case.
  assert not warned(rule, (0.0, 1, 2), (0.1, 1, 4), (0.0, 1, 2), (0.0, 1, 2))
  (line,) = warned(rule, *[(0.0, 1, 2)] * 3)
  assert "rewards of 1 to 2 all count as incorrect" in line
  assert "it is 3" in line
  (line,) = warned(rule, *[(1.0, 4, 5)] * 3)
  assert "rewards of 4 to 5 all count as correct" in line


def test_penalties_of_an_estimator_that_divides_by_the_mean():
  negative = (0.5, -1, 1)
  assert not warned(rules("grpo"), negative)
  rule = rules("grpo", method__use=("maxrl",), reward__incorrect=0.0)
  assert not warned(rule, (0.5, 0, 1))
  (line,) = warned(rule, negative)
  assert "negative reward: rewards are -1 to 1" in line
  assert "divides by rewards of at least 0" in line


@pytest.mark.parametrize(
  "changes",
  [
    {"reward__name": "long"},  # A user's reward.
    {"loss__kl_reward_coefficient": 1e6},  # From the second step on.
  ],
)
def test_a_run_says_what_its_returns_do(model, tmp_path, capsys, changes):
  with registries.registered():
    register.reward("long", lambda response: 10.0 + len(response))
    settings = {"method__use": ("hl_gauss",), "value__pretrain_steps": 1}
    settings |= {"run__steps": 2, "eval__every": 2, **changes}
    run = build.make_run(tiny_run.make_config(model, **settings))
    assert loop.train(run, tmp_path) == 0
  lines = capsys.readouterr().out.splitlines()
  said = [line for line in lines if "value bins: the critic's targets" in line]
  _, *rows = metrics.read_rows(tmp_path / "metrics.jsonl")
  if "reward__name" in changes:
    assert len(said) == 2 and "value pretraining, warning" in said[0]
    for row in rows:
      assert row["reward/min"] >= 10 and row["value/return_max"] > 10
      assert row["health/value_bins"] == 1
  else:
    assert len(said) == 1 and rows[-1]["health/value_bins"] == 1
    assert rows[-1]["value/return_min"] < -2 < rows[-1]["reward/min"]
