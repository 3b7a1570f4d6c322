"""User-defined data, rewards and loss, each trained for a step."""

import dataclasses
import inspect
import json
import pathlib
import re

import pyarrow
import pytest
from helpers import cases, chat_model, programs, tiny_run
from parts import dry_run
from pyarrow import parquet

from jaxrl_llm import api, metrics, register
from jaxrl_llm import config as config_lib
from jaxrl_llm.errors import InputError, TrainingStopped
from jaxrl_llm.system import plugin
from jaxrl_llm.tools import evaluation
from jaxrl_llm.trainer import build, loop

_PROGRAMS = cases.load("code")

_ROOT = pathlib.Path(__file__).parents[1]
QUESTIONS = [(f"{i}+{j}?", i + j) for i in range(1, 5) for j in range(1, 6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """A tiny model with a chat template."""
  path = tiny_run.write_model(tmp_path_factory.mktemp("own") / "tiny")
  text = "{% for m in messages %}{{ m.content }}{% endfor %}{{ more }}"
  (path / "chat_template.jinja").write_text(text)
  return path


def make_config(model, **changes):
  """Makes a config without a critic and with few programs to compile."""
  given = {
    "data__settings": {},
    "estimator__name": "group",
    "loss__nll_coefficient": 0.0,
    "value__pretrain_steps": 0,
    "run__steps": 1,
    "eval__problems": 2,
  }
  return tiny_run.make_config(model, **given | changes)


def train(model, folder, **changes):
  """Trains; returns the rows of metrics, the samples, and the run."""
  run = build.make_run(make_config(model, **changes))
  loop.train(run, folder)
  rows = metrics.read_rows(folder / "metrics.jsonl")
  return rows, metrics.read_rows(folder / "samples.jsonl"), run


def write_jsonl(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


class TestOthers:
  def test_verl(self, model, tmp_path):
    table = [
      {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"split": "train", "index": number},
      }
      for number, (question, answer) in enumerate(QUESTIONS)
    ]
    table = pyarrow.Table.from_pylist(table)
    parquet.write_table(table, tmp_path / "train.parquet")
    (tmp_path / "own_verl_score.py").write_text(_PROGRAMS["own_parts_verl"])
    rows, samples, run = train(
      model,
      tmp_path / "run",
      data__source="parquet",
      data__path=str(tmp_path / "train.parquet"),
      data__template="chat",
      data__template_settings={"kwargs": {"more": "="}},
      reward__name="verl",
      reward__path=str(tmp_path / "own_verl_score.py"),
      reward__workers=1,
    )
    assert all(sample["prompt"].endswith("?=") for sample in samples)
    row = rows[-1]
    assert row["step"] == 1 and row["reward/errors"] == 0
    assert 0 < row["reward/short"] <= row["reward/mean"]
    # One of twenty questions is held out for evaluation.
    assert row["eval/train_heldout/avg@2"] >= 0
    asked = {p.question for p in run.evaluators[0].prompts}
    drawn, _ = run.source.draw(run.source.init(), 19)
    assert len(asked) == 1
    assert {p.question for p in drawn} | asked == {q for q, _ in QUESTIONS}


class TestData:
  def files(self, tmp_path, rows):
    return {
      "data__source": "jsonl",
      "data__path": write_jsonl(tmp_path / "own.jsonl", rows),
    }

  def test_golds_of_openai_pass_the_dry_run(self, model, tmp_path, capsys):
    rows = [
      {"question": question, "answer": f"it is <<{question}>>\n#### {answer}"}
      for question, answer in QUESTIONS
    ]
    changes = self.files(tmp_path, rows) | {"data__holdout": 0.5}
    config = make_config(model, eval__problems=0, **changes)
    run = build.make_run(config)
    dry_run._check_rewards(run)
    assert "10 of 10 reference answers accepted" in capsys.readouterr().out

  def test_correct_answers_are_unknown_for_trl(self, model, tmp_path, capsys):
    rows = [{"prompt": q, "answer": a, "level": 6} for q, a in QUESTIONS]
    (tmp_path / "own_trl_rewards.py").write_text(_PROGRAMS["own_parts_trl"])
    changes = {
      "reward__name": "trl",
      "reward__path": str(tmp_path / "own_trl_rewards.py"),
      "reward__function": "right,short",
    }
    changes |= self.files(tmp_path, rows)
    dry_run._check_rewards(build.make_run(make_config(model, **changes)))
    said = "1 of 1 answers got a verdict (correct responses to 'trl' are"
    assert said in capsys.readouterr().out

  def test_the_same_file_is_called_training_data(self, model, tmp_path):
    rows = [{"question": q, "answer": a} for q, a in QUESTIONS]
    changes = self.files(tmp_path, rows)
    for more in ({"eval__path": changes["data__path"]}, {"data__holdout": 0.0}):
      run = build.make_run(make_config(model, **changes | more))
      assert run.evaluators[0].name == "own_training_data"
      assert "which is also the training data" in run.evaluators[0].origin

  def test_questions_with_different_answers_are_counted(self, model, tmp_path):
    rows = [{"question": q, "answer": a} for q, a in QUESTIONS]
    rows += [{"question": q, "answer": a + 1} for q, a in QUESTIONS]
    rows += rows[:3]
    run = build.make_run(make_config(model, **self.files(tmp_path, rows)))
    said = "; 19 questions of the training data have different answers"
    assert run.evaluators[0].origin.endswith(said)
    changes = self.files(tmp_path, rows[:20] + rows[:3])
    run = build.make_run(make_config(model, **changes))
    assert "different" not in run.evaluators[0].origin

  def test_answers_that_the_verifier_needs(self, model, tmp_path):
    for rows, said in (
      ([{"prompt": q} for q, _ in QUESTIONS], " but c"),
      (
        [{"question": q, "answer": {"a": 1, "b": a}} for q, a in QUESTIONS],
        "19 of 19",
      ),
    ):
      changes = self.files(tmp_path, rows)
      with pytest.raises(
        InputError, match=f"own-.* has no answer in text,.*{said}"
      ):
        build.make_run(make_config(model, **changes))

  def test_rows_without_an_answer_that_a_reward_reads_are_counted(
    self, model, tmp_path
  ):
    register.reward("near", lambda response, answer: float(answer) > 0)
    rows = [{"prompt": q, "answer": a} for q, a in QUESTIONS]
    for row in rows[1::2]:
      del row["answer"]
    changes = self.files(tmp_path, rows) | {"reward__name": "near"}
    with pytest.raises(
      InputError, match="own-2 has no answer, but .*'near' ne"
    ):
      build.make_run(make_config(model, **changes))
    changes |= self.files(tmp_path, rows[::2])
    build.make_run(make_config(model, **changes))
    register.reward("level", lambda response, level, answer="": level)
    changes |= {"reward__name": "level"}
    with pytest.raises(InputError, match="own-1 has no level, .*9 of 9 rows"):
      build.make_run(make_config(model, **changes))
    # Neither group rewards nor methods without rewards need them.
    register.reward("near", lambda response, answer: float(answer) > 0)
    changes |= self.files(tmp_path, rows) | {
      "reward__name": "near",
      "method__use": ("majority",),
      "eval__path": write_jsonl(tmp_path / "eval.jsonl", rows[::2]),
    }
    build.make_run(make_config(model, **changes))

  def test_a_dry_run_shows_answers_in_lists_and_their_absence(
    self, model, tmp_path, capsys
  ):
    register.reward("short", lambda response: float(len(response) < 3))
    for rows, changes, *shown in (
      (
        [{"question": q, "answer": ["no", a]} for q, a in QUESTIONS],
        *({}, "1 of 1 reference answers accepted", "answer 'no' or '"),
      ),
      (
        [{"prompt": q} for q, _ in QUESTIONS],
        *({"reward__name": "short"}, "1 of 1 questions got a verdict"),
        "no answer",
      ),
    ):
      changes |= self.files(tmp_path, rows)
      run = build.make_run(make_config(model, **changes))
      dry_run._check_rewards(run)
      dry_run._show_data(run)
      said = capsys.readouterr().out
      assert all(text in said for text in shown)


def test_a_plugin_that_fails_is_refused(tmp_path):
  for name, text, said in (
    ("exits", "import sys\nsys.exit(0)\n", ", line 2: SystemExit: 0"),
    ("divides", "1 / 0\n", ", line 1: ZeroDivisionError: division by zero"),
    ("null", "a = '\0'\n", ": SyntaxError: source code string cannot contain"),
  ):
    file = tmp_path / f"own_{name}.py"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
      plugin.load(str(file))
    assert str(refused.value).startswith(f"{file}{said}")


class TestFailures:
  FAILS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
  if {when}:
    raise KeyError("oops")
  return 1.0
"""

  def changes(self, tmp_path, name, when):
    file = tmp_path / f"{name}.py"
    file.write_text(self.FAILS.format(when=when))
    return {
      "data__settings": {"max_ops": 2},
      "reward__name": "verl",
      "reward__path": str(file),
    }

  def test_all_of_the_first_batch(self, model, tmp_path, capsys):
    changes = self.changes(tmp_path, "own_always", "True")
    said = (
      r"reward verl: KeyError: 'oops' \(own_always.py:4\) on chain_sum-eval-0"
    )
    with pytest.raises(TrainingStopped, match=f"on all 4 .* of step 0: {said}"):
      train(model, tmp_path / "run", **changes)
    assert capsys.readouterr().out.count("KeyError: 'oops'") >= 1
    samples = metrics.read_rows(tmp_path / "run" / "samples.jsonl")
    assert samples[0]["error"] == "error: KeyError: 'oops' (own_always.py:4)"

  def test_some(self, model, tmp_path, capsys):
    when = "len(solution_str) % 3 == 0"
    changes = self.changes(tmp_path, "own_at_times", when)
    rows, samples, _ = train(
      model, tmp_path / "run", run__samples_every=0, **changes
    )
    row = rows[-1]
    assert 0 < row["reward/errors"] < 32 and row["health/reward_errors"] == 1
    assert row["reward/mean"] == row["reward/accuracy"] == 1
    assert [sample["error"] for sample in samples if sample["error"]]
    out = capsys.readouterr().out
    line = "reward verl: KeyError: 'oops' (own_at_times.py:4) on chain_sum-"
    assert out.count(line) == 1 and "the reward failed on" in out


def script(name, *flags, own="plugin"):
  """Runs a script as a user does; returns its standard output."""
  flags = [f"--plugin=docs/{own}.py", *flags]
  return programs.finish(f"scripts/{name}.py", *flags)[0]


@pytest.mark.slow
def test_a_plugin_trains_and_is_evaluated(model, tmp_path):
  settings = {
    "data__source": "doubles",
    "data__settings": "{'largest': 40}",
    "reward__name": "digits",
    "reward__weights": "{'length': 0.1}",
    "loss__name": "early",
    "run__steps": 1,
    "estimator__name": "group",
    "value__pretrain_steps": 0,
  }
  folder = tmp_path / "run"
  shown = script("train", *tiny_run.flags(model, folder, **settings))
  assert "2 of 40 examples of doubles" in shown
  row = metrics.read_rows(folder / "metrics.jsonl")[-1]
  assert row["reward/errors"] == 0 and 0 <= row["reward/length"] <= 1
  expected = row["reward/right"] + 0.1 * row["reward/length"]
  assert row["reward/mean"] == pytest.approx(expected, rel=1e-5)
  assert row["policy/skipped"] == 0 and row["policy/grad_norm"] > 0
  # A run from another machine, where the file was in another folder.
  recorded = json.dumps(str(pathlib.Path("docs/plugin.py").resolve()))
  text = (folder / "config.json").read_text()
  assert recorded in text
  text = text.replace(recorded, '"/elsewhere/plugin.py"')
  (folder / "config.json").write_text(text)
  shown = script("evaluate", f"--checkpoint={folder}")
  last = json.loads(shown.splitlines()[-1])
  assert last["dataset"] == "doubles_heldout" and last["unjudged_fraction"] == 0
  for name in ("avg@2", "reward_mean"):
    assert last[name] == pytest.approx(row[f"eval/doubles_heldout/{name}"])


@pytest.mark.parametrize(
  ("recorded", "given", "named"),
  [
    ({"run.plugins": ("spy_plugin.py",)}, {}, "spy_plugin.py"),
    ({"run.plugins": ("spy_plugin.py",)}, {"run.plugins": ()}, ""),
    ({"method.use": ("hapo", "spy_method.py:mine")}, {}, "spy_method.py"),
    ({"method.use": ("spy_method.py:mine",)}, {"method.use": ()}, ""),
    ({"reward.name": "verl", "reward.path": "spy_score.py"}, {}, "spy_score"),
    (
      {"reward.name": "verl", "reward.path": "spy_score.py"},
      {"reward.path": "spy_score.py"},
      "",
    ),
    ({"reward.name": "numeric", "reward.path": "spy_score.py"}, {}, ""),
  ],
)
def test_the_code_that_a_run_names_needs_trust(
  model, tmp_path, recorded, given, named
):
  config = tiny_run.make_config(model)
  config_lib.update(config, recorded)
  text = json.dumps(config.to_dict(), default=str)
  (tmp_path / "config.json").write_text(text)
  policy = api.Policy(tmp_path, 1)
  if named:
    with pytest.raises(InputError, match=f"name code .*{named}.*--trust_code"):
      evaluation.make_config(policy, "", given)
    policy = dataclasses.replace(policy, trust_code=True)
  found = evaluation.make_config(policy, "", given)
  assert found.reward.name == config.reward.name


@pytest.mark.slow
def test_a_tool_of_a_chat_model(tmp_path):
  # readme_test.py trains with it, with the guide's commands.
  calls = [
    f"<tool_call>{json.dumps({'name': 'double', 'arguments': {'number': n}})}"
    "</tool_call>"
    for n in range(20, 30)
  ]
  chat = chat_model.write(tmp_path / "chat", words=calls)
  flags = ["--chat", "--prompt=What is 2 + 2?", "--environment=doubling"]
  flags += [f"--model={chat}"]
  shown = script("generate", *flags, own="plugin_environment")
  called = 0
  for sample in map(json.loads, shown.splitlines()):
    turns = sample["turns"]
    for asked, answer in zip(turns[::2], turns[1::2]):
      numbers = re.findall(r'"number": (\d+)}}</tool_call>', asked["text"])
      doubles = "".join(f"tool: {2 * int(number)}\n" for number in numbers)
      assert answer["text"] == f"\n{doubles}assistant: "
      called += len(numbers)
  assert called


_VERBS = [
  name
  for name, verb in vars(register).items()
  if inspect.isfunction(verb)
  and verb.__module__ == register.__name__
  and not name.startswith("_")
]


@pytest.mark.parametrize("verb", _VERBS)
def test_what_cannot_be_called_is_refused_when_it_is_registered(verb):
  said = "cannot be called; give a function|give a Family"
  with pytest.raises(ValueError, match=said):
    getattr(register, verb)("three", 3)
