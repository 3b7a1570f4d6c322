"""Invalid input ends a training run with code 2 and one line, at the start."""

import contextlib
import json
import pathlib
import re
import shutil

import pytest
from helpers import cases, configs, programs, tiny_run

from jaxrl_llm import config as config_lib
from jaxrl_llm.config import presets
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build
from jaxrl_llm.trainer.validation import validate

_CASES = cases.load("refusals")


def assert_refused(arguments, *parts):
  """Checks the line with which scripts/train.py rejects its arguments."""
  line = programs.refused("train", *arguments)
  assert line.startswith("error: ") and line.endswith("\n")
  for part in parts:
    assert part in line


def test_a_jsonl_line(model, tmp_path):
  file = tmp_path / "data.jsonl"
  file.write_text('{"question": "1+1?", "answer": "2"}\n{"question": \n')
  changes = {"data__source": "jsonl", "data__path": file}
  flags = tiny_run.flags(model, tmp_path / "run", **changes)
  flags += ["--config.data.settings={}"]
  assert_refused(flags, f"{file}:2: not JSON")
  assert not (tmp_path / "run").exists()


class TestMethodFiles:
  """Every error in a user's method file names the file, and the line."""

  @cases.table("body, where, why", _CASES["files"])
  def test_errors_name_the_line(self, body, where, why, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
      "from jaxrl_llm import config as lib\n\n"
      "def get_config(preset=''):\n"
      f"  config = lib.method('grpo')\n  {body}\n"
    )
    line = f", line {where}" if where else ""
    assert_refused([f"--config={file}"], f"error: {file}{line}: ", why)
    with pytest.raises(InputError, match=re.escape(f"{file}{line}: ")):
      config_lib.method(str(file))

  def test_without_a_function(self, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def get_configs():\n  pass\n")
    expected = f"error: {file}: it has no function get_config(preset)"
    assert_refused([f"--config={file}"], expected)

  def test_are_read_from_python(self, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("mine.py").write_text(
      "from jaxrl_llm import config as lib\n"
      "def get_config():\n  return lib.method('grpo', 'gsm8k')\n"
    )
    config = config_lib.method("mine.py", **{"run.steps": 7})
    assert config.run.method == "mine" and config.run.steps == 7


@contextlib.contextmanager
def refused(*parts):
  """Expects an InputError, which the script reports with exit code 2."""
  with pytest.raises(InputError) as error:
    yield
  text = str(error.value)
  assert "\n" not in text and len(text) < 600
  for part in parts:
    assert str(part) in text, text


def write_lines(path, *records):
  path.write_text("".join(json.dumps(r) + "\n" for r in records))
  return path


class TestSettings:
  @cases.table("row", _CASES["runs"])
  def test_are_refused(self, model, row):
    settings, *parts = row
    changes = {
      key.replace(".", "__"): configs.value(text)
      for key, _, text in (word.partition("=") for word in settings.split())
    }
    with refused(*parts):
      build.make_run(tiny_run.make_config(model, **changes))

  def test_updates_per_step_follow_the_batch(self):
    sizes = {}
    for prompts in (8, 6):
      config = tiny_run.make_config(
        "none",
        data__prompts_per_step=prompts,
        optimizer__policy__mini_batch=0,
        optimizer__policy__updates_per_step=2,
        optimizer__value__mini_batch=0,
        optimizer__value__epochs=3,
      )
      validate(config)
      of = {x: build.update_settings(config, x) for x in ("policy", "value")}
      sizes[prompts] = [(x.mini_batch, x.updates) for x in of.values()]
    # Six steps, each with 2 updates of the policy and 3 of the critic.
    assert sizes == {8: [(16, 12), (32, 18)], 6: [(12, 12), (24, 18)]}
    plain = tiny_run.make_config("none")
    alike = tiny_run.make_config(
      "none",
      optimizer__policy__mini_batch=0,
      optimizer__policy__updates_per_step=2,
    )
    settings = [build.update_settings(x, "policy") for x in (plain, alike)]
    assert settings[0] == settings[1]

  @pytest.mark.parametrize(
    "changes",
    [
      # The number of responses that end in a window varies.
      {"schedule__window": 4},
      # There is no critic.
      {"estimator__name": "group", "value__pretrain_steps": 0},
    ],
  )
  def test_a_mini_batch_of_the_critic_that_need_not_divide(self, changes):
    validate(
      tiny_run.make_config("none", optimizer__value__mini_batch=10, **changes)
    )

  @pytest.mark.parametrize(
    ("asked", "expected"), [(0, 24), (23, 24), (24, 24), (40, 40)]
  )
  def test_a_row_holds_at_least_the_longest_sample(self, asked, expected):
    config = tiny_run.make_config("none", optimizer__max_tokens_per_row=asked)
    validate(config)
    assert config_lib.max_tokens_per_row(config) == expected

  def test_every_key_says_what_it_means_and_bears_its_default(self):
    for path, key in config_lib.KEYS.items():
      assert len(key.meaning) > 5 and key.meaning.endswith("."), path
      if key.allowed is not None and key.default is not None:
        several = isinstance(key.default, tuple)
        for value in key.default if several else (key.default,):
          assert value in key.allowed, path

  def test_help_prints_every_key(self):
    code, shown, errors = programs.run("train", "--help_config")
    assert code == 0, errors
    for path in config_lib.KEYS:
      assert f"\n{path} = " in f"\n{shown}"
    text = " ".join(shown.split())
    assert "loss.name = 'clip'; one of 'clip' " in text
    assert "a registered name or one of a_3po, adhint, arrol, asyppo, " in text

  @pytest.mark.parametrize("preset", presets.SCALES)
  def test_presets_are_valid_and_leave_the_method_alone(self, preset):
    plain, (scaled, _) = config_lib.default_config(), config_lib.scaled(preset)
    assert scaled.to_dict() != plain.to_dict()
    # Only alpha depends on the response length.
    kept = {"estimator": {"alpha": plain.estimator.alpha}}
    for group in ("estimator", "loss", "off_policy", "schedule", "value"):
      kept.setdefault(group, {})
      got = scaled[group].to_dict() | kept[group]
      if group == "value":  # These may differ by scale.
        names = ("pretrain_patience", "reads_logprobs", "lora_rank")
        got |= {name: plain.value[name] for name in names}
      assert got == plain[group].to_dict()
    if scaled.data.source == "jsonl":
      scaled.data.path = "some.jsonl"
    validate(scaled)


@pytest.mark.parametrize(
  "file", ["", "model.safetensors", "config.json", "tokenizer.json"]
)
def test_a_model_that_is_missing_or_lacks_a_file(model, tmp_path, file):
  # Damaged files: models/hf_test.py.
  copy, said = tmp_path / "copy", file.removeprefix("model.")
  if file:
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns(file))
  with refused(copy, said or "no such directory"):
    run = build.make_run(tiny_run.make_config(copy))
    run.learner.init(critic=run.critic_params)


class TestData:
  def make_run(self, model, path, **changes):
    return build.make_run(
      tiny_run.make_config(
        model,
        data__source="jsonl",
        data__path=str(path),
        data__settings={},
        **changes,
      )
    )

  def test_a_data_set_of_the_hub(self, model):
    how = "`hf download openai/gsm8k --repo-type=dataset --local-dir DIR`"
    with refused("openai/gsm8k: cannot be read", how, "to_json("):
      self.make_run(model, "openai/gsm8k")

  @pytest.mark.parametrize(
    ("question", "said"),
    [
      ("1+1+1+1+1+1+1?", "'data-9' has 14 tokens, the limit is 12"),
      ("1\u00e9?", "cannot tokenise '1\u00e9?'"),
    ],
  )
  def test_a_prompt_that_is_drawn_late(self, model, tmp_path, question, said):
    asked = [f"1+{i}?" for i in range(8)] + [question]
    rows = [{"question": text, "answer": "1"} for text in asked]
    good = write_lines(tmp_path / "good.jsonl", *rows[:8])
    file = write_lines(tmp_path / "data.jsonl", *rows)
    with refused(said):
      self.make_run(model, file, eval__path=str(good))
    self.make_run(model, good)

  def test_the_run_knows_the_files_that_it_read(self, model, tmp_path):
    row = lambda i: {"question": f"1+{i}?", "answer": "1"}
    file = write_lines(tmp_path / "a.jsonl", *map(row, range(4)))
    own = tmp_path / "own_code.py"
    own.write_text("")
    inputs = lambda: self.make_run(model, file, run__plugins=(str(own),)).inputs
    before = inputs()
    assert inputs() == before
    own.write_text("pass")
    write_lines(tmp_path / "a.jsonl", *map(row, range(1, 5)))
    after = inputs()
    changed = [key for key in before if after[key] != before[key]]
    assert changed == ["data.path", "run.plugins"]
