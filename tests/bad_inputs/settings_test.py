"""Settings that would hang, exhaust memory or be meaningless are rejected."""

import pytest
from helpers import cases, tiny_run

from jaxrl_llm import config as config_lib
from jaxrl_llm.config import schema
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build, validation

_INF, _NAN = float("inf"), float("nan")
_SOURCES = cases.load("settings")["sources"]
# Key -> values that its type and the table of settings allow.
_VALUES = {
  "data.max_prompt_length": [10**9],
  "estimator.settings": [None],
  "loss.kl": ["k1"],  # Its expected gradient is 0.
  "eval.pass_k": [("1",), (1.5,), None],
  "mesh.data": [0, 10**6],
  "optimizer.policy.mini_batch": [33],
  "optimizer.policy.updates_per_step": [2],
  "run.steps": [None, 2**40],
  "sampler.max_response_length": [10**9],
}


def _excluded(setting):
  """Returns values of a setting's type that the table does not allow."""
  several = isinstance(setting.default, tuple)
  values = ["nope"]
  if isinstance(setting.allowed, schema.Range):
    low, high, _ = setting.allowed
    values = [low - 1.0, high + 1.0, _INF, _NAN]
    if isinstance(low if several else setting.default, int):
      values = [int(x) for x in values if abs(x) < _INF]
  values = [x for x in values if x not in setting.allowed]
  return [(x,) for x in values] if several else values


def one_line(config):
  with pytest.raises(InputError) as error:
    build.make_run(config)
  said = str(error.value)
  assert said.isprintable() and len(said) < 500
  return said


@cases.table("source, settings", [*_SOURCES, ("chain_sum", {"min_ops": None})])
def test_settings_of_a_task(model, source, settings):
  config = tiny_run.make_config(model)
  config.data.source, config.data.settings = source, settings
  said = one_line(config)
  assert "data.settings" in said and any(name in said for name in settings)


@pytest.mark.parametrize(
  ("key", "value"),
  [(key, value) for key, values in _VALUES.items() for value in values],
)
def test_values_of_a_key(model, key, value):
  config = tiny_run.make_config(model)
  config.update_from_flattened_dict({key: value})
  assert f"config.{key.removesuffix('.data')}" in one_line(config)


@pytest.mark.parametrize(
  "key", [key for key, x in config_lib.KEYS.items() if x.allowed is not None]
)
def test_values_that_the_table_excludes(key):
  # The page of settings lists allowed values: see docs_test.py.
  setting = config_lib.KEYS[key]
  for value in _excluded(setting):
    config = config_lib.default_config()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(InputError) as error:
      validation.validate(config)
    said = f"config.{key}={value!r} must be {setting.allowed}"
    assert str(error.value) == said and said.isprintable()
