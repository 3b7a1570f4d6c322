"""Invalid input ends a training run with code 2 and one line, at the start."""

import contextlib
import json
import pathlib
import re
import shutil

import pytest
from helpers import configs, programs, tiny_run

from jaxrl_llm import config as config_lib
from jaxrl_llm.config import presets
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build
from jaxrl_llm.trainer.validation import validate

ROOT = pathlib.Path(__file__).parents[1]
VAPO = "--config=configs/vapo.py"


def assert_refused(arguments, *parts):
  """Checks the line with which scripts/train.py rejects its arguments."""
  line = programs.refused("train", *arguments)
  assert line.startswith("error: ") and line.endswith("\n")
  for part in parts:
    assert part in line


class TestCommandLine:
  @pytest.fixture(autouse=True)
  def _here(self, monkeypatch):
    monkeypatch.chdir(ROOT)

  @pytest.mark.parametrize(
    ("arguments", "parts"),
    [
      ([VAPO, "--config.run.stepz=3"], ["run.stepz", "mean run.steps?"]),
      (["--config.run.stepz=3"], ["run.stepz", "mean run.steps?"]),
      ([VAPO, "--num_processes=2"], ["=2 without --coordinator"]),
      (
        [VAPO, "--config.data.settings.digits=3"],
        ["--config.data.settings=\"{'NAME': VALUE}\""],
      ),
      ([VAPO, "--config.run.steps=abc"], ["--config.run.steps=abc"]),
      ([VAPO, "--config.run.steps=2.5"], ["--config.run.steps=2.5"]),
      ([VAPO, "--config.loss.dual_clip=x"], ["--config.loss.dual_clip=x"]),
      ([VAPO, "--config.run=3"], ["--config.run=3"]),
      ([VAPO, "--wrkdir=x"], ["wrkdir"]),
      ([VAPO, "run"], ["'run' is not a flag"]),
      ([VAPO + ":nope"], ["preset 'nope' is unknown", "smollm2"]),
      (["--config=vapo:nope"], ["error: preset 'nope' is unknown"]),
      (["--config", "vapo:nope"], ["error: preset 'nope' is unknown"]),
      (["--config=configs/nope.py"], ["'configs/nope.py'", "give a file"]),
      ([], ["give --config=METHOD[:PRESET], see --help"]),
      (["--config=configs/ppo2.py"], ["configs/ppo2.py", "ppo_ewma, reinf"]),
      (
        ["--config=vappo"],
        ["'vappo' is unknown", "one of adhint", "vapo, vc_"],
      ),
      ([VAPO, "--config.run.steps=four"], ["=four: give a whole number"]),
      ([VAPO, "--config.loss.clip_low=low"], ["=low: give a number"]),
      ([VAPO, "--config.loss.clip_low=2.0"], ["=2.0 must be in [0, 1]"]),
      ([VAPO, "--config.checkpoint.keep=-1"], ["=-1 must be at least 2"]),
      ([VAPO, "--config.loss.dual_clip=1.0"], ["=1.0 must be above 1"]),
      ([VAPO, "--config.run.seed=-1"], ["=-1 must be in [0, 2147483647]"]),
      ([VAPO, "--config.run.steps=" + "9" * 20], ["in [0, 2147483647]"]),
      ([VAPO, "--config.estimator.alpha=0.0"], ["must be at least 1e-06"]),
      ([VAPO, "--workdir="], ["--workdir= is empty; give a folder"]),
    ],
  )
  def test_is_refused_at_once(self, arguments, parts):
    assert_refused(arguments, *parts)

  @pytest.mark.parametrize("more", [[], ["--dry_run"]])
  @pytest.mark.parametrize(
    "given", ["value.lora_rank=8", "optimizer.value.learning_rate=0.5"]
  )
  def test_a_critic_that_the_method_does_not_have(self, given, more, tmp_path):
    key, value = given.split("=")
    flags = ["--config=grpo", f"--config.{given}", f"--workdir={tmp_path}/run"]
    said = f"config.{key}={value}: grpo has no critic that would read it"
    assert_refused([*flags, *more], said)
    assert not (tmp_path / "run" / "config.json").exists()

  def test_a_jsonl_line(self, model, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"question": "1+1?", "answer": "2"}\n{"question": \n')
    changes = {"data__source": "jsonl", "data__path": file}
    flags = tiny_run.flags(model, tmp_path / "run", **changes)
    flags += ["--config.data.settings={}"]
    assert_refused(flags, f"{file}:2: not JSON")
    assert not (tmp_path / "run").exists()


class TestMethodFiles:
  """Every error in a user's method file names the file, and the line."""

  @pytest.mark.parametrize(
    ("body", "where", "why"),
    [
      ("x = config", "", "get_config returned None; give a config made by"),
      ("return {'a': 1}", "", "get_config returned {'a': 1}; give a config"),
      ("1 / 0", 5, "ZeroDivisionError: division by zero"),
      ("import nopackage", 5, "ModuleNotFoundError: No module named 'nopac"),
      ("config.run.stepz = 3", 5, "'stepz' is no key; did you mean run.steps?"),
      ("config.run['stepz'] = 3", 5, "no key; did you mean run.steps?"),
      ("print(config.run.stepz)", 5, "no key; did you mean run.steps?"),
      ("config.num_generations = 3", 5, "is data.group_size here"),
      ("lib.update(config, {'run.stepz': 3})", 5, "mean run.steps?"),
      ("print(config['run']['stepz'])", 5, "no key; did you mean run.steps?"),
      ("print({}['a'])", 5, "KeyError: 'a'"),
      ("print(None.a)", 5, "AttributeError: 'NoneType' object has no attr"),
      ("return config.schedule.nothing", 5, "'nothing' is no key"),
      ("config.schedule = None; return config", "", "a config without sched"),
      ("config.run.steps = 'x'", 5, "TypeError: Could not override field"),
      ("raise SystemExit(3)", 5, "SystemExit: 3"),
      ("return ][", 5, "SyntaxError: unmatched ']'"),
      ("return lib.scaled('nope')", 5, "preset 'nope' is unknown; choose"),
      ("raise KeyError", 5, "KeyError:"),
    ],
  )
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


# Settings and parts of the error message.
REFUSED = """\
optimizer.value.mini_batch=10 | value.mini_batch=10 with \
  config.optimizer.value.updates_per_step=1 | must divide the batch of 32
estimator.name=group value.pretrain_steps=0 optimizer.policy.mini_batch=10 | \
  optimizer.policy.mini_batch=10 with | =1: must divide the batch
optimizer.policy.updates_per_step=4 | mini_batch=16 with \
  config.optimizer.policy.updates_per_step=4 | use mini_batch=0 or \
  updates_per_step=1
optimizer.value.mini_batch=0 optimizer.value.updates_per_step=5 | \
  value.mini_batch=0 with config.optimizer.value.updates_per_step=5 | \
  must divide the batch of 32
mesh.data=16 | mesh data=16 x fsdp=1 x context=1 x tensor=1 needs 16 devices \
  | are 8
mesh.data=4 | optimizer.policy.micro_batch_size=2 must be a multiple of | = 4
data.source=jsonl | source 'jsonl' needs data.path
data.source=jsonl data.path=x data.split=test | config.data.split='test' | \
  'jsonl' | has no splits | eval.path
data.path=x.jsonl | config.data.path='x.jsonl' with config.data.source= | \
  reads no files; set data.source='jsonl'
reward.path=score.py | config.reward.path='score.py' with config.reward.name= \
  | only verl and trl
environment.settings={'a':1} | config.environment.settings={'a': 1} with | \
  there is no environment
sampler.slots=2 | sampler.slots=2 | must hold at least one group
reward.correct=-1.0 | reward.correct=-1.0 with config.reward.incorrect=-1.0: \
  a correct
sampler.max_response_length=60 | max_response_length = 72 exceeds the \
  model's context of 64
data.settings={'digits':2} | config.data.settings | digits
sampler.stop=('12',) | sampler.stop has '12' | 2 tokens
"""


class TestSettings:
  @pytest.mark.parametrize("row", REFUSED.splitlines())
  def test_are_refused(self, model, row):
    settings, *parts = re.split(r"\s*\|\s*", re.sub(r"\s+", " ", row))
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
