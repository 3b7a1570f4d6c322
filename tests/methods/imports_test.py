"""Files of methods/: a function of their name, imported when it is used."""

import importlib
import inspect
import pathlib
import subprocess
import sys

import pytest

from jaxrl_llm import config as config_lib
from jaxrl_llm import methods, register
from jaxrl_llm.config import zoo

FILES = pathlib.Path(methods.__file__).parent.glob("[a-z]*.py")
NAMES = sorted(file.stem for file in FILES)
_PROGRAM = """
import runpy, sys
from jaxrl_llm import config as config_lib
from jaxrl_llm.learner.core import make_algorithm
from jaxrl_llm.trainer.validation import validate
text = config_lib.describe()
assert all(x in text for x in ("hapo", "method.vcpo.ess_reference", "gspo"))
for method in ("vapo", "vcpo", "distill"):
  config = runpy.run_path(f"configs/{method}.py")["get_config"]()
  if method == "distill":
    config.method.distill.teachers = "a"
  validate(config)
  make_algorithm(config)
  start = "jaxrl_llm.methods."
  print(*sorted(m[len(start):] for m in sys.modules if m.startswith(start)))
"""


def test_an_unused_method_is_not_imported():
  command = [sys.executable, "-c", _PROGRAM]
  done = subprocess.run(command, check=True, capture_output=True, text=True)
  assert done.stdout.splitlines() == ["", "rloo vcpo", "distill rloo vcpo"]


def test_the_names_are_those_of_the_files():
  assert list(zoo.names()) == NAMES
  allowed = config_lib.KEYS["method.use"].allowed
  assert all(name in allowed for name in [*NAMES, "a/b.py:f"])
  assert "clip" not in allowed


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_the_function_are_settings(name):
  module = importlib.import_module(f"jaxrl_llm.methods.{name}")
  parameters = inspect.signature(getattr(module, name)).parameters
  assert [*parameters][:2] == ["algorithm", "s"]
  own = [*parameters.values()][2:]
  assert all(p.kind is p.KEYWORD_ONLY for p in own)
  start = f"method.{name}."
  keys = {k: x for k, x in config_lib.KEYS.items() if k.startswith(start)}
  assert [*keys] == [start + p.name for p in own]
  for parameter, key in zip(own, keys.values()):
    assert key.default == parameter.default
    assert type(key.default) is type(parameter.default) and key.meaning


@pytest.mark.parametrize("name", ["cispo", "vcpo"])
def test_a_name_of_a_file_is_taken(name):
  with pytest.raises(ValueError, match=f"'{name}' already exists; use another"):
    register.method(name, lambda algorithm, s: algorithm)
