"""Making a method's config in Python."""

import re
import sys

import pytest
from absl import flags
from helpers import cases
from ml_collections import ConfigDict, config_flags

import jaxrl_llm
from jaxrl_llm import config as config_lib
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer.validation import validate

_CASES = cases.load("config")


class TestMethod:
  @pytest.mark.parametrize("preset", ["", "gsm8k"])
  @pytest.mark.parametrize("name", ["grpo", "vapo"])
  def test_equals_that_of_the_command_line(self, name, preset, monkeypatch):
    path = f"{config_lib.methods()[name]}:{preset}".rstrip(":")
    given = f"--config={path}", "--config.run.steps=7"
    monkeypatch.setattr(sys, "argv", ["train", *given])
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", path, flag_values=values)
    values(["train", *given])
    config = config_lib.method(name, preset, **{"run.steps": 7})
    assert config.run.method == name + (preset and f":{preset}")
    config.run.method = ""
    assert config.to_dict() == values.config.to_dict()

  def test_settings_may_be_of_every_kind(self):
    settings = {
      "optimizer.policy.learning_rate": 1,
      "loss.dual_clip": 3.0,
      "run.trackers": ("tensorboard",),
      "data.path": "x.jsonl",
    }
    config = config_lib.method("ppo", **settings)
    assert {k: config_lib.get(config, k) for k in settings} == settings

  @cases.table("arguments, message", _CASES["errors_are_one_line"])
  def test_errors_are_one_line(self, arguments, message):
    name, preset, settings = arguments
    with pytest.raises(InputError, match=message):
      config_lib.method(name, preset, **settings)


@pytest.mark.parametrize("value", [{"a": 1}, None, "grpo", ConfigDict()])
def test_what_is_no_config_is_refused_in_one_line(value, tmp_path):
  for use in (
    lambda: jaxrl_llm.train(value, tmp_path),
    lambda: validate(value),
  ):
    with pytest.raises(InputError, match="given .*; give a config made by"):
      use()


def test_shares_of_a_batch_are_rounded():
  settings = {"schedule.over_provision": 1.1, "schedule.replay": 0.29}
  config = config_lib.method("grpo", **settings)
  config.data.prompts_per_step = 10
  assert config_lib.groups_in_flight(config) == 11  # 10 * 1.1 > 11.
  config.data.prompts_per_step = 100
  assert config_lib.replayed_groups(config) == 29  # 100 * 0.29 < 29.


class TestPaths:
  def test_existing_ones_become_absolute(self, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "a,b.jsonl", "score.py", "golden"):
      (tmp_path / name).touch()
    for name in ("model", "mnist", "teachers/one"):
      (tmp_path / name).mkdir(parents=True)
    (tmp_path / "model" / "config.json").touch()
    here = lambda *names: ",".join(str(tmp_path / name) for name in names)
    expected = {
      "data.path": ("a.jsonl,./b.jsonl", here("a.jsonl", "b.jsonl")),
      "eval.path": ("gsm8k,*.jsonl,x", f"gsm8k,{here('*.jsonl')},x"),
      "model.path": ("model", here("model")),
      "value.init_from": ("org/model", "org/model"),
      "reward.path": (here("score.py"), here("score.py")),
      "estimator.settings": (
        {"teachers": "model,teachers/one", "delta": 0.5, "list": ["a.jsonl"]},
        {
          "teachers": here("model", "teachers/one"),
          "delta": 0.5,
          "list": [here("a.jsonl")],
        },
      ),
      # A folder without a model may have the name of something else.
      "data.order_settings": ({"oracle": "mnist"}, {"oracle": "mnist"}),
      "method.distill.teachers": (
        "model,teachers/one",
        here("model", "teachers/one"),
      ),
      "method.sapo.replay_from": (("later",), (here("later"),)),
      "method.sapo.share_in": ("shared", here("shared")),
      "method.use": (
        ("gspo", "score.py:mine"),
        ("gspo", f"{here('score.py')}:mine"),
      ),
      "run.plugins": (("score.py",), (here("score.py"),)),
    }
    config = config_lib.default_config()
    config_lib.update(config, {key: old for key, (old, _) in expected.items()})
    found = config_lib.with_absolute_paths(config)
    for key, (_, after) in expected.items():
      assert config_lib.get(found.to_dict(), key) == after, key
    assert config.data.path == "a.jsonl,./b.jsonl"  # A copy.
    again = config_lib.with_absolute_paths(found)
    assert again.to_dict() == found.to_dict()
    config.data.path = "a,b.jsonl"
    assert config_lib.with_absolute_paths(config).data.path == here("a,b.jsonl")

  def test_every_setting_that_may_hold_one_is_marked(self):
    words = re.compile("(?i)files?|director(y|ies)|folder|workdir|keyword arg")
    others = {"data.source", "data.template_settings"}
    for key, entry in config_lib.KEYS.items():
      text = isinstance(entry.default, (str, tuple, dict))
      named = key.endswith("path") or words.search(entry.meaning)
      if text and named and key not in others:
        assert entry.path, key
