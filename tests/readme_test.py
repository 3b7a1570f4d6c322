"""Runs every command line and snippet of the README and the guide as printed.

Settings that make a run small (steps, sizes) are appended, and the named model
is random. Lines run in order in one folder, as a reader would type them.
"""

import functools
import importlib
import json
import pathlib
import re
import shlex
import sys

import pytest
from helpers import chat_model, programs
from helpers.registries import registered

import jaxrl_llm

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_README, _GUIDE = (
  (_ROOT / name).read_text("utf-8") for name in ("README.md", "docs/guide.md")
)
# Commands that install something or need the network.
_NOT_RUN = ("git", "make", "pip", "hf")

_SIZES = {
  "mesh.data": 1,  # As on a laptop.
  "value.pretrain_steps": 0,
  "model.remat_policy": "none",  # Compiles faster.
  "data.prompts_per_step": 4,
  "data.group_size": 2,
  "sampler.max_response_length": 8,
  "optimizer.policy.updates_per_step": 1,
  "optimizer.value.updates_per_step": 1,
  "optimizer.policy.mini_batch": 0,
  "optimizer.value.mini_batch": 0,
  "optimizer.policy.micro_batch_size": 8,
  "optimizer.value.micro_batch_size": 8,
  "eval.greedy": False,  # Fewer programs.
  "sampler.parity_check_every": 0,
  "eval.samples": 2,
  "eval.problems": 2,
  "checkpoint.every": 1,
  "run.trackers": (),
}
_CONFIG = [f"--config.{key}={value}" for key, value in _SIZES.items()]
# Flags that make a program small, in addition to the printed ones.
_SMALL = {
  "train": _CONFIG,
  "evaluate": ["--problems=2"],
  "generate": ["--max_new_tokens=4"],
  "study": [
    *("--seeds=0", "--variants=VAPO", "--config.run.steps=1"),
    *("--config.reward.overlong_buffer=0", *_CONFIG),
  ],
  "simulate": [
    *("--groups=4", "--group_size=4", "--slots=8", "--steps=3"),
    *("--median=64", "--max=256", "--p99=2"),
  ],
  "convert": [],
  "report": [],
  "detect": [],
}
# Users' files that command lines name.
_FILES = {
  "questions.jsonl": '{"prompt": "What is 2 + 2?"}\n',
  "score.py": (
    "def compute_score(data_source, solution_str, ground_truth,"
    " extra_info=None):\n"
    "  return float(ground_truth in solution_str)\n"
  ),
  "rewards.py": (
    "def exact(prompts, completions, answer, **columns):\n"
    "  return [float(a in c) for a, c in zip(answer, completions)]\n\n\n"
    "def short(prompts, completions, **columns):\n"
    "  return [-len(c) / 1000 for c in completions]\n"
  ),
}


def _blocks(language, text=_README + _GUIDE):
  found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
  return [text for name, text in found if name == language]


def _lines():
  """Returns command lines without their comments, in order."""
  lines = "\n".join(_blocks("")).splitlines()
  programs = (*_NOT_RUN, "python", "jaxrl-")
  lines = [re.split(r"\s{2,}#", line)[0].strip() for line in lines]
  return list(dict.fromkeys(x for x in lines if x.startswith(programs)))


_RUN = [line for line in _lines() if not line.startswith(_NOT_RUN)]


def _arguments(line):
  """Returns (program, arguments) of a line, made small."""
  program, *arguments = shlex.split(line)
  if program == "python":
    program, *arguments = arguments
  name = pathlib.Path(program).stem.removeprefix("jaxrl-")
  steps = []
  if name == "train":
    # A line with a number of steps resumes a run with fewer steps.
    goes_on = any(flag.startswith("--config.run.steps") for flag in arguments)
    steps = [f"--config.run.steps={1 + goes_on}"]
    # Prompts have 80 word tokens; the random model is limited to 512.
    if any(f":{name}" in line for name in ("smollm2", "qwen", "one-gpu")):
      steps.append("--config.data.max_prompt_length=128")
  return name, [*arguments, *_SMALL[name], *steps]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder with a clone and the files that a reader would add."""
  folder = tmp_path_factory.mktemp("clone")
  for name in ("configs", "scripts", "docs"):
    (folder / name).symlink_to(_ROOT / name)
  chat_model.write(folder / "smollm2")
  for name in ("qwen", "qwen3"):
    (folder / name).symlink_to(folder / "smollm2")
  for name, text in _FILES.items():
    (folder / name).write_text(text)
  for block in _blocks("python"):
    if match := re.match(r"# (\w+\.py)\n", block):
      (folder / match[1]).write_text(block)
  (rows,) = _blocks("json")
  more = [
    json.dumps({"question": f"What is {k} + {k}?", "answer": str(2 * k)})
    for k in range(40)
  ]
  (folder / "fleet").mkdir()
  for host in range(3):
    (folder / "fleet" / f"worker-{host}.jsonl").write_text(
      "".join(f'{{"time": {i}, "power": {i % 7}}}\n' for i in range(600))
    )
  for name in ("train.jsonl", "test.jsonl"):
    (folder / name).write_text(rows + "\n".join(more) + "\n")
  with registered():
    yield folder
  for plugin in ("my", "plugin_environment", "score", "rewards"):
    sys.modules.pop(plugin, None)


@pytest.mark.slow
@pytest.mark.parametrize("line", _RUN)
def test_a_line_runs_as_it_is_printed(line, folder, monkeypatch):
  monkeypatch.chdir(folder)
  monkeypatch.setenv("XLA_FLAGS", programs.FLAGS)  # For the study's runs.
  name, arguments = _arguments(line)
  if name in ("train", "evaluate"):
    code, _, errors = programs.run(name, *arguments)
    assert not code, errors
  else:
    assert not importlib.import_module(name).main(arguments)


def test_no_line_is_forgotten():
  names = {_arguments(line)[0] for line in _RUN}
  assert names == set(_SMALL)  # Every program is shown and runs small.
  skipped = {line.split()[0] for line in _lines()} - {"python"}
  assert {word for word in skipped if not word.startswith("jaxrl-")} == {
    *_NOT_RUN
  }


def test_the_snippet_of_the_readme_runs():
  names = {}
  (_, snippet) = _blocks("python", _README)  # The first defines a reward.
  exec(snippet, names)
  assert names["loss"].shape == (2, 3)


@pytest.mark.slow
def test_the_snippet_of_the_guide_trains(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  method = functools.partial(jaxrl_llm.config.method, **_SIZES)
  monkeypatch.setattr(jaxrl_llm.config, "method", method)
  names = {}
  (snippet,) = _blocks("python", _GUIDE)
  exec(snippet, names)
  assert names["policy"].step == 2 and (tmp_path / "grpo").is_dir()
