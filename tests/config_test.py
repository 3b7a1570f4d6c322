"""Making a method's config in Python."""

import sys

import pytest
from absl import flags
from ml_collections import config_flags

from jaxrl_llm import config as config_lib
from jaxrl_llm.errors import InputError


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

  @pytest.mark.parametrize(
    ("arguments", "message"),
    [
      (("gropo", "", {}), "method 'gropo' is unknown; choose adhint, areal"),
      (("grpo", "gsm9k", {}), "preset 'gsm9k' is unknown; choose"),
      (("grpo", "", {"run.stepz": 1}), "config.run.stepz: no such key"),
      (
        ("grpo", "", {"run.steps": "1"}),
        "config.run.steps='1'.*of the right type",
      ),
    ],
  )
  def test_errors_are_one_line(self, arguments, message):
    name, preset, settings = arguments
    with pytest.raises(InputError, match=message):
      config_lib.method(name, preset, **settings)


def test_shares_of_a_batch_are_rounded():
  settings = {"schedule.over_provision": 1.1, "schedule.replay": 0.29}
  config = config_lib.method("grpo", **settings)
  config.data.prompts_per_step = 10
  assert config_lib.groups_in_flight(config) == 11  # 10 * 1.1 > 11.
  config.data.prompts_per_step = 100
  assert config_lib.replayed_groups(config) == 29  # 100 * 0.29 < 29.
