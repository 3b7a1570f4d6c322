"""Runs with several evaluation sets and several data sources."""

import json
import pathlib

import numpy as np
import pyarrow
import pytest
from helpers import chat_model, programs, tiny_run
from parts import dry_run
from pyarrow import parquet

from jaxrl_llm import metrics, workdir
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build, loop


def write(path, questions):
  """Writes sums with their answers."""
  answer = lambda q: str(sum(map(int, q.strip(" ?").split("+"))))
  return write_rows(
    path, [{"question": q, "answer": answer(q)} for q in questions]
  )


def write_rows(path, rows):
  """Writes rows as JSON lines or Parquet; returns the path as text."""
  path.parent.mkdir(exist_ok=True)
  if path.suffix == ".parquet":
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  else:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def make_config(model, train, evaluate, **changes):
  settings = {
    "value__pretrain_steps": 0,
    "data__settings": {},
    "data__source": "jsonl",
    "data__path": train,
    "data__max_prompt_length": 20,
    "eval__path": evaluate,
    "eval__problems": 3,
  }
  return tiny_run.make_config(model, **settings | changes)


def sums(first, count=4):
  return [f"{first}+{i}?" for i in range(count)]


class TestSets:
  def evaluators(self, model, train, evaluate, **changes):
    run = build.make_run(make_config(model, train, evaluate, **changes))
    return run.evaluators

  def test_have_problems_of_their_own(self, model, tmp_path):
    train = write(tmp_path / "train.jsonl", sums(1))
    two = write(tmp_path / "two.parquet", sums(2, 2))
    four = write(tmp_path / "four.jsonl", sums(4))
    found = self.evaluators(model, train, f"{two},{four},chain_sum")
    asked = {one.name: [p.question for p in one.prompts] for one in found}
    assert list(asked) == ["two", "four", "chain_sum"]
    assert asked["two"] == sums(2, 2) and asked["four"] == sums(4, 3)
    assert len(asked["chain_sum"]) == 3
    assert not any(one.origin for one in found)
    writers = [one.writer for one in found]
    assert writers[0] == writers[1] == writers[2]  # One engine.
    every = self.evaluators(model, train, four, eval__problems=0)
    assert [p.question for p in every[0].prompts] == sums(4)

  def test_none_takes_the_place_of_one_that_is_dropped(self, model, tmp_path):
    train = write(tmp_path / "train.jsonl", sums(1))
    test = write(tmp_path / "test.jsonl", [*sums(2, 1), "1+" * 9 + "1?"])
    changes = {"data__on_long": "drop", "data__max_prompt_length": 12}
    (one,) = self.evaluators(model, train, test, **changes)
    assert [p.question for p in one.prompts] == sums(2, 1)

  def test_files_share_the_columns_of_the_training_data(self, model, tmp_path):
    row = lambda name: {"text": "1+2?", "info": {"result": name}}
    train, b, c = (
      write_rows(tmp_path / name, [row(name)])
      for name in ("a.jsonl", "b.parquet", "c.jsonl")
    )
    columns = {"question": "text", "answer": "info.result"}
    found = self.evaluators(model, train, f"{b},{c}", data__columns=columns)
    assert [one.prompts[0].answer for one in found] == ["b.parquet", "c.jsonl"]

  def test_benchmarks_have_their_own_columns(
    self, model, tmp_path, monkeypatch
  ):
    cache = tmp_path / "datasets--math-ai--aime25"
    folder = cache / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    write(folder / "test.jsonl", ["1+1?"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    train = write_rows(
      tmp_path / "own.jsonl", [{"text": "1+2?", "answer": "3"}]
    )
    columns = {"question": "text"}
    (one,) = self.evaluators(model, train, "aime25", data__columns=columns)
    assert (one.name, one.prompts[0].question) == ("aime25", "1+1?")


def test_names_of_control_tokens_in_prompts_are_told(tmp_path, capsys):
  model = chat_model.write(tmp_path / "chat")
  asked = ["user: 1+1?<eos>", "1+2?", "1+3?"]
  rows = [{"question": text, "answer": "2"} for text in asked]
  train = write_rows(tmp_path / "train.jsonl", rows)
  config = make_config(
    *(model, train, ""),
    data__holdout=0.0,
    data__template="chat",
    data__max_prompt_length=60,
  )
  run = build.make_run(config)
  (line,) = run.notes
  assert line.startswith(
    "warning: 1 of 3 prompts contain names of control tokens, such as '<eos>',"
  )
  asked = {p.question: p for p in run.source.draw(run.source.init(), 3)[0]}
  shown = run.tokenizer.show(asked["user: 1+1?<eos>"].tokens)
  assert shown == "user: user: 1+1?[text <eos>]<eos>\nassistant: "
  dry_run._show_data(run)
  assert line in capsys.readouterr().out.splitlines()


class TestOverlap:
  @pytest.fixture(scope="class")
  def model(self, tmp_path_factory):
    """A model whose tokenizer has spaces, too."""
    return chat_model.write(tmp_path_factory.mktemp("model") / "chat")

  def run(self, model, tmp_path, on_overlap):
    one = write(tmp_path / "one.jsonl", sums(1))
    other = write(tmp_path / "other.jsonl", [f"{x} " for x in sums(2)])
    test = write(tmp_path / "test.jsonl", ["1+0?", *sums(3), "2+3?"])
    apart = write(tmp_path / "apart.jsonl", sums(4))
    changes = {"eval__on_overlap": on_overlap, "eval__problems": 0}
    return build.make_run(
      make_config(model, f"{one},{other}", f"{test},{apart}", **changes)
    )

  def test_is_counted_by_set(self, model, tmp_path):
    first, second = self.run(model, tmp_path, "warn").evaluators
    told = "2 of 6 evaluated questions of test are trained on; remove them"
    assert first.origin.startswith(told) and len(first.prompts) == 6
    assert second.origin == ""

  def test_is_left_out(self, model, tmp_path):
    first, second = self.run(model, tmp_path, "drop").evaluators
    assert [p.question for p in first.prompts] == sums(3)
    assert first.origin == "2 training questions are left out of test"
    assert [p.question for p in second.prompts] == sums(4)
    assert second.origin == ""

  def test_others_take_their_place(self, model, tmp_path):
    train = write(tmp_path / "train.jsonl", sums(1))
    test = write(tmp_path / "test.jsonl", [*sums(1), *sums(3)])
    config = make_config(model, train, test, eval__on_overlap="drop")
    (one,) = build.make_run(config).evaluators
    assert [p.question for p in one.prompts] == sums(3, 3)

  @pytest.mark.parametrize("holdout", [0.0, 0.05])
  def test_that_is_everything(self, model, tmp_path, holdout):
    train = write(tmp_path / "train.jsonl", sums(1))
    path = "" if holdout == 0 else train
    config = make_config(
      *(model, train, path), eval__on_overlap="drop", data__holdout=holdout
    )
    with pytest.raises(InputError, match="train_training_data: all questions"):
      build.make_run(config)


class TestRun:
  """Several sets and sources, with lag, greedy evaluation and best step."""

  CHANGES = {
    "data__prompts_per_step": 2,
    "optimizer__policy__mini_batch": 8,
    "optimizer__value__mini_batch": 8,
    "schedule__lag": 1,
    "eval__greedy": True,
    "eval__every": 2,
    "run__steps": 4,
    "checkpoint__every": 2,
    "checkpoint__best": "eval/y_test/greedy",
  }

  @pytest.fixture(scope="class")
  def run(self, model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    # One question per source in each step.
    asked = {"a": sums(1, 1), "b": sums(2, 1)}
    train = [write(folder / f"{x}.jsonl", asked[x]) for x in asked]
    sets = [write(folder / f"{x}/test.jsonl", sums(5)) for x in "xy"]
    paths = ",".join(train), ",".join([*sets, "chain_sum"])
    return build.make_run(make_config(model, *paths, **self.CHANGES))

  @pytest.fixture(scope="class")
  def whole(self, run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    loop.train(run, folder)
    return folder

  def test_rows_have_every_set(self, whole):
    rows = metrics.read_rows(whole / "metrics.jsonl")
    names = "avg@2", "avg@2_se", "pass@2", "greedy", "response_length_mean"
    for row in rows:
      for one in ("x_test", "y_test", "chain_sum"):
        found = {f"eval/{one}/{name}" in row for name in names}
        assert found == {row["step"] in (0, 2, 4)}
    # The same questions with the same random numbers.
    x, y = (rows[-1][f"eval/{one}/avg@2"] for one in ("x_test", "y_test"))
    assert x == y

  def test_rows_have_every_source(self, whole):
    rows = metrics.read_rows(whole / "metrics.jsonl")[1:]
    for name in ("reward/{}mean", "rollout/{}response_length_mean"):
      for row in rows:
        # One group per source: their mean is the batch's mean.
        parts = [row[name.format(f"{source}/")] for source in "ab"]
        np.testing.assert_allclose(np.mean(parts), row[name.format("")], 1e-6)

  def test_evaluate_repeats_all_of_them(self, whole, tmp_path):
    def evaluate(*flags):
      code, output, errors = programs.run(
        "evaluate", f"--checkpoint={whole}", *flags
      )
      assert code == 0, errors
      found = json.loads(output.splitlines()[-1])["sets"]
      return {one["dataset"]: one["avg@2"] for one in found}

    found = evaluate()
    assert list(found) == ["x_test", "y_test", "chain_sum"]
    last = metrics.read_rows(whole / "metrics.jsonl")[-1]
    for name, average in found.items():
      assert average == last[f"eval/{name}/avg@2"]
    test = write(tmp_path / "mine.jsonl", sums(6))
    found = evaluate(f"--dataset={test},remainder")
    assert list(found) == ["mine", "remainder"]


def test_one_source_has_no_metrics_of_its_own(model, tmp_path):
  train = write(tmp_path / "train.jsonl", sums(1))
  config = make_config(model, train, train, run__steps=1, eval__problems=1)
  run = build.make_run(config)
  assert not run.source.has_several_sources
  for sources in (2, 50, 51):
    rows = [
      {"question": f"1+{i}?", "answer": "1", "data_source": f"s{i}"}
      for i in range(sources)
    ]
    write_rows(tmp_path / "train.jsonl", rows)
    several = build.make_run(config).source.has_several_sources
    assert several == (sources <= 50)


def test_a_run_resumes_from_another_directory(model, tmp_path, monkeypatch):
  home, away = tmp_path / "home", tmp_path / "away"
  away.mkdir()
  write(home / "train.jsonl", sums(1))
  write(home / "test.jsonl", sums(2))
  monkeypatch.chdir(home)
  paths = "train.jsonl", "test.jsonl"
  run = build.make_run(make_config(model, *paths, run__steps=1))
  loop.train(run, pathlib.Path("run"))
  monkeypatch.chdir(away)
  config = workdir.read_config(home / "run")
  assert config.data.path == str(home / "train.jsonl")
  assert config.eval.path == str(home / "test.jsonl")
  config.run.steps = 2
  assert loop.train(build.make_run(config), home / "run") == 0
