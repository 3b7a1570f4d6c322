"""Tests of scripts/evaluate.py, scripts/convert.py and workdir."""

import json
import shutil

import convert
import generate
import jax
import numpy as np
import pytest
from helpers import cases, chat_model, programs, tiny_run

from jaxrl_llm import api, metrics, models, workdir
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build, loop

_CASES = cases.load("evaluate")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
  """A run of two steps: its model directory and its workdir."""
  config = tiny_run.make_config(
    model, run__steps=2, value__pretrain_steps=0, eval__every=1
  )
  directory = tmp_path_factory.mktemp("run") / "workdir"
  loop.train(build.make_run(config), directory)
  return model, directory


def _evaluate(*flags):
  """Returns the JSON object that scripts/evaluate.py prints."""
  code, output, errors = programs.run("evaluate", *flags)
  assert code == 0, errors
  return json.loads(output.splitlines()[-1])


class TestWorkdir:
  def test_keys_that_are_missing_have_defaults(self, tmp_path):
    text = '{"sampler": {"stop": ["."]}, "data": {"settings": {"digits": 2}}}'
    (tmp_path / "config.json").write_text(text)
    config = workdir.read_config(tmp_path)
    assert config.sampler.stop == (".",)
    assert dict(config.data.settings) == {"digits": 2}
    assert config.run.seed == 0

  @cases.table("text, message", _CASES["damaged_config"])
  def test_damaged_config(self, text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
      workdir.read_config(tmp_path)

  def test_policy_needs_no_other_item(self, run, tmp_path):
    _, directory = run
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    items = [p for p in (copy / "checkpoints" / "2").iterdir() if p.is_dir()]
    others = [p for p in items if p.name != "learner.policy.trained"]
    assert len(items) - len(others) == 1
    assert {p.name for p in others} >= {
      "learner.policy.optimizer",
      "learner.critic.trained",
      "learner.critic.optimizer",
    }
    for item in others:
      shutil.rmtree(item)
    one, other = (api.load(folder).params for folder in (copy, directory))
    jax.tree.map(np.testing.assert_array_equal, one, other)


class TestAlone:
  @pytest.fixture(scope="class")
  def moved(self, run, tmp_path_factory):
    """A moved run whose base model, a relative path, can no longer be found."""
    _, directory = run
    folder = tmp_path_factory.mktemp("moved") / "run"
    shutil.copytree(directory, folder)
    saved = json.loads((folder / "config.json").read_text())
    saved["model"]["path"] = "elsewhere/model"
    (folder / "config.json").write_text(json.dumps(saved))
    return folder

  def test_convert_and_generate(self, run, moved, tmp_path, capsys):
    model, _ = run
    out, file = tmp_path / "out", tmp_path / "samples.jsonl"
    assert convert.main([f"--checkpoint={moved}", f"--out={out}"]) == 0
    for name in ("tokenizer.json", "generation_config.json"):
      assert (out / name).read_bytes() == (model / name).read_bytes()
    flags = ["--prompt=3+5?", "--samples=2", "--max_new_tokens=4"]
    assert generate.main([f"--model={moved}", f"--out={file}", *flags]) == 0
    assert len(file.read_text().splitlines()) == 2
    # The run's copy of model files is not a complete model directory.
    own = moved / "base_model"
    assert convert.main([f"--checkpoint={moved}", f"--out={own}"]) == 2
    assert "choose another" in capsys.readouterr().err

  def test_evaluate_repeats_the_evaluation_of_the_run(self, moved):
    result = _evaluate(f"--checkpoint={moved}", "--step=1")
    found = [result[name] for name in ("step", "problems", "samples")]
    assert found == [1, 16, 2]
    row = metrics.read_rows(moved / "metrics.jsonl")[1]
    prefix = f"eval/{result['dataset']}/"
    keys = [k for k in row if k.startswith(prefix)]
    assert f"{prefix}avg@2" in keys
    for key in keys:
      assert result[key.removeprefix(prefix)] == row[key], key

  def test_search_by_the_critic(self, moved):
    result = _evaluate(f"--checkpoint={moved}", "--search=dora")
    assert result["step"] == 2
    assert 0 <= result["best@2"] <= result["pass@2"]
    flags = f"--checkpoint={moved}", "--search=broad"
    code, _, errors = programs.run("evaluate", *flags)
    assert code == 2 and "--search=broad" in errors and "beam" in errors


class TestConvert:
  def test_export_equals_the_checkpoint(self, run, tmp_path, capsys):
    model, directory = run
    out = tmp_path / "out"
    assert convert.main([f"--checkpoint={directory}", f"--out={out}"]) == 0
    assert "policy of step 2" in capsys.readouterr().out
    policy = api.load(directory)
    fns, params = models.load(out)
    assert fns.config == policy.fns.config
    jax.tree.map(np.testing.assert_array_equal, params, policy.params)
    start = models.load(model)[1]["embed"]["embedding"]
    assert not np.array_equal(start, params["embed"]["embedding"])

  def test_an_earlier_step_in_bfloat16(self, run, tmp_path):
    _, directory = run
    out = tmp_path / "out"
    flags = (f"--checkpoint={directory}", f"--out={out}", "--step=1")
    assert convert.main([*flags, "--dtype=bfloat16"]) == 0
    policy = api.load(directory, step=1)
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), policy.params)
    _, written = models.load(out, dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, written, rounded)

  def test_a_run_without_a_critic(self, run, tmp_path):
    folder = shutil.copytree(run[1], tmp_path / "run")
    for item in folder.glob("checkpoints/2/learner.critic.*"):
      shutil.rmtree(item)
    flags = f"--checkpoint={folder}", f"--out={tmp_path / 'out'}", "--critic"
    refused = programs.refused(convert.main, *flags)
    assert "has no critic; give a run with one" in refused

  def test_bad_input_is_one_line(self, run):
    flags = f"--checkpoint={run[1]}", "--out="
    assert "--out is empty" in programs.refused(convert.main, *flags)


class TestEvaluate:
  def test_model_directory_with_own_problems(self, tmp_path):
    model = chat_model.write(tmp_path / "chat")
    problems = tmp_path / "problems.jsonl"
    rows = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(3)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = _evaluate(
      *(f"--checkpoint={model}", f"--dataset={problems}", "--samples=6"),
      *("--problems=2", "--temperature=0.5", "--seed=3"),
      *("--config.sampler.max_response_length=8", "--config.mesh.data=1"),
      f"--out={tmp_path / 'out'}",
    )
    lines = (tmp_path / "out" / "problems.jsonl").read_text().splitlines()
    asked = [json.loads(line) for line in lines]
    assert [p["question"] for p in asked] == ["0+1?", "1+1?"]
    assert all(len(p["responses"]) == 6 for p in asked)
    right = sum(p["correct"] for p in asked)
    assert right / 12 == pytest.approx(result["avg@6"])
    assert result["dataset"] == "problems"
    assert result["step"] is None
    assert (result["problems"], result["samples"]) == (2, 6)
    assert (result["temperature"], result["seed"]) == (0.5, 3)
    passes = [k for k in result if k.startswith("pass@") and k[-3:] != "_se"]
    assert passes == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert result["pass@1"] == pytest.approx(result["avg@6"])
    assert result["response_length_max"] <= 8

  def test_responses_do_not_replace_the_problems(self, run, tmp_path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"question": "1+1?", "answer": "2"}\n')
    flags = f"--checkpoint={run[1]}", f"--dataset={problems}"
    for out, message in (
      (tmp_path, f"would overwrite {problems}, the evaluation data"),
      (problems, "cannot be written (File exists); choose another"),
    ):
      refused = programs.refused("evaluate", *flags, f"--out={out}")
      assert message in refused
    assert problems.read_text().count("\n") == 1

  @cases.table("flags, message", _CASES["bad_input_is_one_line"])
  def test_bad_input_is_one_line(self, run, flags, message):
    model, directory = run
    flags = [flag.format(model=model, run=directory) for flag in flags]
    assert message in programs.refused("evaluate", *flags)
