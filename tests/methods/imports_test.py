"""Files of methods/ are imported when a config names a part of them."""

import pathlib
import subprocess
import sys

import pytest

from jaxrl_llm import losses, methods, models, register, rewards
from jaxrl_llm.data import prompt_source, replay
from jaxrl_llm.learner import choices, providers
from jaxrl_llm.system import plugin

_TABLES = {
  table.kind: table
  for module in (choices, models, prompt_source, providers, replay, rewards)
  for table in vars(module).values()
  if isinstance(table, plugin.Table)
}
_PROGRAM = """
import runpy, sys
from jaxrl_llm import config as config_lib
from jaxrl_llm.learner.build_algorithm import make_algorithm
from jaxrl_llm.trainer.validation import validate
text = config_lib.describe()
assert all(repr(x) in text for x in ("hapo", "gspo", "optimal_baseline"))
for method in ("vapo", "vcpo", "distill"):
  config = runpy.run_path(f"configs/{method}.py")["get_config"]()
  validate(config)
  make_algorithm(config)
  start = "jaxrl_llm.methods."
  print(*sorted(m[len(start):] for m in sys.modules if m.startswith(start)))
"""


def test_an_unused_method_is_not_imported():
  command = [sys.executable, "-c", _PROGRAM]
  done = subprocess.run(command, check=True, capture_output=True, text=True)
  imported = done.stdout.splitlines()
  assert imported == ["", "rloo vcpo", "distill rloo vcpo"]


@pytest.mark.parametrize("file", methods.FILES)
def test_a_file_registers_what_the_table_says(file):
  for kind, names in methods.FILES[file].items():
    for name in names.split():
      assert name in list(_TABLES[kind])  # Also before its import.
      assert _TABLES[kind][name] != file
    assert f"jaxrl_llm.methods.{file}" in sys.modules


def test_a_name_of_a_file_that_is_not_imported_yet_is_taken(monkeypatch):
  monkeypatch.setitem(choices.POLICY_LOSSES, "cispo", "cispo")
  monkeypatch.delitem(sys.modules, "jaxrl_llm.methods.cispo", raising=False)
  with pytest.raises(ValueError, match="'cispo' already exists"):
    register.loss("cispo", losses.clipped_policy_loss)
  made = choices.POLICY_LOSSES["cispo"]({"clip_high": 0.2})
  assert made.reads == ("logprobs", "proximal_logprobs", "advantages")


def test_every_file_is_in_the_table():
  folder = pathlib.Path(methods.__file__).parent
  assert {p.stem for p in folder.glob("[a-z]*.py")} == set(methods.FILES)
