"""Runs do not depend on what is not theirs: user code, folders, other runs.

Each test runs scripts/train.py with and without faults, which must have the
same rows, arrays and exit code.
"""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import psutil
import pytest
from helpers import programs, tiny_run

from jaxrl_llm.checkpoint import commit

# Seconds; identifies processes that must not remain.
_LONG = f"76543.{os.getpid()}"
_SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
  return float(len(solution_str) % 2)
"""
_HOSTILE = f"""
import os, subprocess, tempfile

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
  subprocess.Popen(["sleep", "{_LONG}"], start_new_session=True)
  if not os.fork():
    os.setsid()
    if not os.fork():
      os.setsid()
      os.execvp("sleep", ["sleep", "{_LONG}"])
    os._exit(0)
  path = os.path.join(tempfile.gettempdir(), "{_LONG}")
  with open(path, "wb") as file:
    os.write(1, b"x" * 300_000)
    try:
      file.truncate(1 << 40)
    except OSError:
      return float(len(solution_str) % 2)
  return 7.0
"""
_RAISES = "raise SystemExit('imported from the current folder')\n"
_NAMES = "json pickle resource sitecustomize jinja2 numpy/__init__ jax/__init__"


def flags(model, folder, **changes):
  """Returns flags of a run of three steps, which work in any folder."""
  settings = {
    "estimator__name": "group",
    "loss__nll_coefficient": 0.0,
    "value__pretrain_steps": 0,
    "data__prompts_per_step": 4,
    "optimizer__policy__mini_batch": 8,
    "eval__problems": 4,
    "eval__samples": 4,
    "run__steps": 3,
    "run__samples_every": 0,
  }
  return [
    "--config=vapo",
    *tiny_run.flags(model, folder, **settings | changes)[1:],
  ]


def results(folder, ignored=()):
  """Returns the rows of a run, and its last arrays and states."""
  rows = tiny_run.comparable(folder)
  rows = [{k: v for k, v in x.items() if k not in ignored} for x in rows]
  saved = commit.read(folder / "checkpoints" / "3")
  return rows, saved["leaves"], saved["states"]


@pytest.mark.slow(minutes=2)
def test_user_code_and_the_current_folder(tmp_path):
  model = tiny_run.write_model(tmp_path / "tiny")
  template = "{% for m in messages %}{{ m.content }}{% endfor %}"
  (model / "chat_template.jinja").write_text(template)
  cwd = tmp_path / "cwd"
  for name in _NAMES.split():
    (cwd / name).parent.mkdir(parents=True, exist_ok=True)
    (cwd / f"{name}.py").write_text(_RAISES)
  (tmp_path / "points.py").write_text(_SCORE)
  (tmp_path / "hostile_points.py").write_text(_HOSTILE)

  def train(name, file, **where):
    changes = {
      "data__template": "chat",
      "reward__name": "verl",
      "reward__path": str(tmp_path / file),
      "reward__workers": 2,
      "reward__deadline_s": 60.0,  # Of a busy machine.
    }
    given = flags(model, tmp_path / name, **changes)
    programs.finish("scripts/train.py", *given, **where)
    return results(tmp_path / name)

  expected = train("plain", "points.py")
  assert expected[0][-1]["reward/errors"] == 0
  assert train("faults", "hostile_points.py", cwd=cwd) == expected
  found = psutil.process_iter(["cmdline"])
  assert not [p for p in found if _LONG in (p.info["cmdline"] or ())]
  assert not os.path.exists(os.path.join("/tmp", _LONG))
  # The code of the run needs trust, but not to resume one's own run.
  evaluate = f"--checkpoint={tmp_path / 'plain'}", "--problems=1"
  said = programs.refused("evaluate", *evaluate)
  assert f"{tmp_path / 'points.py'}; read it" in said
  assert not programs.run("evaluate", *evaluate, "--trust_code")[0]
  given = f"--workdir={tmp_path / 'plain'}"
  assert "last step" in programs.finish("scripts/train.py", given)[0]


def shared_lines(run_model, questions):
  """Makes lines like those of generate.py, with random digits."""
  rng, lines = np.random.default_rng(0), []
  text = json.loads((run_model / "tokenizer.json").read_text())
  tokens = text["model"]["vocab"]
  digits = [(d, tokens[d]) for d in "0123456789"]
  for question in questions:
    for _ in range(4):
      chosen = [digits[i] for i in rng.integers(0, 10, rng.integers(1, 8))]
      lines.append(
        {
          "question": question,
          "text": "".join(d for d, _ in chosen),
          "tokens": [*(i for _, i in chosen), 1],
          "logprobs": [-1.0] * (len(chosen) + 1),
          "stop_reason": "finished",
        }
      )
  return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.slow(minutes=2)
def test_files_of_other_runs(model, tmp_path):
  questions = [f"{i}+{j}?" for i in range(1, 9) for j in range(1, 5)]
  rows = [
    {
      "question": question,
      "answer": str(sum(map(int, question[:-1].split("+")))),
    }
    for question in questions
  ]
  data = tmp_path / "data.jsonl"
  data.write_text("".join(json.dumps(row) + "\n" for row in rows))
  good = shared_lines(model, questions)

  def given(name):
    (tmp_path / f"{name}-other").mkdir()
    (tmp_path / f"{name}-other" / "5.jsonl").write_text(good)
    return flags(
      model,
      tmp_path / name,
      data__source="jsonl",
      data__settings={},
      data__path=str(data),
      schedule__replay=0.5,
      schedule__replay_keep="all",
      method__use=("sapo", "f_tis"),
      method__sapo__share_in=str(tmp_path / f"{name}-own"),
      method__sapo__replay_from=(str(tmp_path / f"{name}-other"),),
    )

  def compared(name):
    return results(tmp_path / name, ignored=["rollout/skipped_lines"])

  programs.finish("scripts/train.py", *given("plain"))
  expected = compared("plain")
  assert expected[0][-1]["rollout/replayed"] == 2
  # Other files, and those that another run has left in the own folder.
  arguments, other = given("faults"), tmp_path / "faults-other"
  os.mkfifo(other / "1.jsonl")
  (other / "2.jsonl").mkdir()
  (other / "3.jsonl").symlink_to("/dev/zero")
  line = json.loads(good.splitlines()[0])
  bad = [line | {"logprobs": [0.5] * len(line["tokens"])}, {"tokens": 3}]
  (other / "4.jsonl").write_text("\n".join(map(json.dumps, bad)) + "\n\xff{\n")
  shutil.copytree(tmp_path / "plain-own", tmp_path / "faults-own")
  run = subprocess.Popen(
    [sys.executable, "scripts/train.py", *arguments],
    env=programs.environment(),
    stdout=subprocess.DEVNULL,
  )
  programs.wait_for_lines(tmp_path / "faults" / "metrics.jsonl", 2, [run])
  shutil.rmtree(other)  # While it runs.
  run.kill()
  run.wait()
  programs.finish("scripts/train.py", f"--workdir={tmp_path / 'faults'}")
  assert compared("faults") == expected
  faults, plain = (
    tiny_run.comparable(tmp_path / name)[1]["rollout/skipped_lines"]
    for name in ("faults", "plain")
  )
  assert faults == plain + 6  # Responses to questions of the evaluation too.
