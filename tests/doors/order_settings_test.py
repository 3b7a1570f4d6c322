"""Settings of a user-defined prompt source."""

import pytest
from helpers import doors

from jaxrl_llm import register
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build


class Budgets(PromptSource):
  def __init__(self, *args, most=32, **settings):
    if most < 1:
      raise ValueError(f"most={most} must be positive")
    super().__init__(*args, **settings)
    self.most = most


def make_run(model, settings, **changes):
  register.prompt_source("budgets", Budgets)
  changes = {"data__order": "budgets"} | changes
  config = doors.make_config(model, **changes)
  config.data.order_settings = settings
  return build.make_run(config)


def test_reach_the_source(model):
  assert make_run(model, {"most": 8}).source.most == 8


@pytest.mark.parametrize(
  ("settings", "why"),
  [
    ({"mots": 8}, r"unexpected keyword argument 'mots'.*the settings of"),
    (
      {"most": 0},
      r"most=0 must be positive\); correct the settings of 'budgets'",
    ),
    ({"seed": 1}, r"multiple values for keyword argument 'seed'"),
  ],
)
def test_of_others_are_refused(model, settings, why):
  with pytest.raises(InputError, match=rf"config.data.order_settings=.*{why}"):
    make_run(model, settings)


def test_of_a_method_are_refused_in_its_name(model):
  def own(algorithm, s):
    return algorithm.change(prompts=Budgets, prompt_settings={"mots": 8})

  register.method("own", own)
  said = "config.method.use=.'own',. .*'mots'.; correct the arguments of its"
  with pytest.raises(InputError, match=said):
    build.make_run(doors.make_config(model, method__use=("own",)))


@pytest.mark.parametrize(
  ("settings", "changes", "key"),
  [
    ({}, {"method__use": ("dps",)}, "data.order"),
    (
      {"explore": 0.5},
      {"method__use": ("dps",), "data__order": "shuffled"},
      "data.order_settings",
    ),
  ],
)
def test_that_a_method_replaces_are_refused(model, settings, changes, key):
  said = rf"with config.{key}=.*: a method replaces it; leave {key} out"
  with pytest.raises(InputError, match=said):
    make_run(model, settings, **changes)


def test_the_order_of_the_package_has_none(model):
  with pytest.raises(InputError, match="'most'.*the settings of 'shuffled'"):
    make_run(model, {"most": 8}, data__order="shuffled")
