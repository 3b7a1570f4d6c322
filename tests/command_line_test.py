"""Hints for command lines that a program rejects."""

import importlib.util
import pathlib
import re

import pytest
from helpers import cases
from parts import command_line

from jaxrl_llm.config import hints

_CASES = cases.load("refusals")


def explain(*arguments):
  return command_line.explain(ValueError("?"), ["train.py", *arguments])


@cases.table("key, hint", _CASES["keys"])
def test_a_key_that_no_config_has(key, hint):
  line = explain(f"--config.{key}=8")
  assert line.startswith(f"--config.{key}: no such key; ")
  assert hint in line and "\n" not in line


@cases.table("argument, as_read", _CASES["whole_numbers"])
def test_whole_numbers(argument, as_read):
  (argument,) = command_line._prepared([argument])
  assert argument.endswith(as_read)


# Names of earlier versions, or of scripts, which users still have.
_EARLIER = {
  *("system_prompt", "warmup_ratio", "torch_dtype", "sft_trainer"),
  *("use_token_level_loss", "sync_ref_model", "ref_model_sync_steps"),
  "ref_model_mixup_alpha",
}


def test_the_keys_of_common_scripts_have_rows():
  assert {*_CASES["peers"].split()} <= hints._peers().keys()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("column", "libraries"), [(0, ("trl", "transformers")), (1, ("verl",))]
)
def test_rows_name_settings_that_exist(column, libraries):
  text = ""
  for library in libraries:
    found = importlib.util.find_spec(library)
    if found is None:
      pytest.skip(f"{library} is not installed")
    (folder,) = map(pathlib.Path, found.submodule_search_locations)
    # All of transformers has too many words.
    name = "training_args.py" if library == "transformers" else "*.py"
    files = [*folder.rglob(name), *folder.rglob("*.yaml")]
    text += "\n".join(file.read_text("utf-8", "ignore") for file in files)
  words = set(re.findall(r"\w+", text)) | _EARLIER
  page = (hints.folder("docs") / "settings.md").read_text("utf-8")
  rows = [line for line in page.splitlines() if line.startswith("| ")]
  names = {
    name.partition("=")[0].rpartition(".")[2]
    for row in rows
    for name in re.findall("`([^`]+)`", row.strip("|").split("|")[column])
  }
  assert sorted(names - words) == []
