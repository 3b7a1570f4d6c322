"""What user-defined parts do not support is refused before a run starts."""

import numpy as np
import pytest
from helpers import cases, configs, doors

from jaxrl_llm import register
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.algorithm import ProcessorSpec
from jaxrl_llm.learner.parts import part
from jaxrl_llm.sampling import EngineStats
from jaxrl_llm.trainer import build


class Server:
  """An engine with a setting."""

  def __init__(self, fns, config, tokenizer, *, batch=8):
    if batch < 1:
      raise ValueError(f"batch={batch} must be positive")
    self.config, self.stats = config, EngineStats()


class Budgets(PromptSource):
  def __init__(self, *args, most=32, **settings):
    if most < 1:
      raise ValueError(f"most={most} must be positive")
    super().__init__(*args, **settings)
    self.most = most


def no_zeros(distribution, context, state):
  return distribution


PROCESSORS = {
  "foo": ProcessorSpec(no_zeros, part(lambda foo: foo), np.float32(0)),
  "few": ProcessorSpec(lambda logits: logits),
  "many": ProcessorSpec(lambda d, c, s, k: d),
  "first": ProcessorSpec(no_zeros),
  "second": ProcessorSpec(no_zeros),
}


@pytest.fixture(autouse=True)
def own():
  register.engine("server", Server)
  register.prompt_source("budgets", Budgets)
  register.group_reward("picky", lambda texts, verdicts: verdicts)
  register.method(
    "mots", lambda a, s: a.change(prompts=Budgets, prompt_settings={"mots": 8})
  )
  for name, spec in PROCESSORS.items():
    given = {"same" if name in ("first", "second") else "own": spec}
    register.method(name, lambda a, s, x=given: a.change(processors=x))


def make_run(model, settings):
  given = (word.partition("=") for word in settings.split())
  changes = {key.replace(".", "__"): configs.value(x) for key, _, x in given}
  return build.make_run(doors.make_config(model, **changes))


@cases.table("row", cases.load("refusals")["doors"])
def test_is_refused(model, row):
  settings, said = row
  with pytest.raises(InputError, match=said):
    make_run(model, settings)


def test_settings_reach_a_prompt_source(model):
  settings = "data.order=budgets data.order_settings={'most':8}"
  assert make_run(model, settings).source.most == 8
