"""Tests of the top-level API: `train`, `load` and the policies they return."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import cases, registries, tiny_run

import jaxrl_llm
from jaxrl_llm import base_models, metrics, models, register
from jaxrl_llm import config as config_lib
from jaxrl_llm.errors import InputError
from jaxrl_llm.tools import evaluation
from jaxrl_llm.trainer.validation import validate

_CASES = cases.load("api")

STEPS = 2


@pytest.fixture(scope="module")
def settings(model):
  """Settings of a run that takes seconds, from a tiny random model."""
  settings = tiny_run.overrides(model) | {"run.steps": STEPS}
  settings |= {"checkpoint.every": 1, "value.pretrain_steps": 0}
  return {"optimizer.policy.mini_batch": 16} | settings


@pytest.fixture(scope="module")
def trained(settings, tmp_path_factory):
  """The policy of a run with a critic, and its folder."""
  folder = tmp_path_factory.mktemp("run") / "run"
  config = config_lib.method("vapo", **settings)
  return jaxrl_llm.train(config, folder), folder


def _equal(tree, other):
  jax.tree.map(np.testing.assert_array_equal, tree, other)


def test_the_package_shows_its_names_without_importing_them():
  code = (
    "import sys, jaxrl_llm\n"
    "names = dir(jaxrl_llm)\n"
    "assert 'jax' not in sys.modules\n"
    "assert {'train', 'load', 'Policy', 'estimators', 'losses'} <= set(names)\n"
    "assert jaxrl_llm.estimators.gae and 'flax' not in sys.modules\n"
    "assert all(getattr(jaxrl_llm, name) for name in names)\n"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
  with pytest.raises(AttributeError, match="no attribute 'trian'"):
    _ = jaxrl_llm.trian


def test_a_run_trains_and_gives_its_policy(trained, settings):
  policy, folder = trained
  assert policy.step == STEPS and policy.path == folder
  start = jaxrl_llm.load(settings["model.path"])
  assert start.step is None
  pairs = zip(jax.tree.leaves(policy.params), jax.tree.leaves(start.params))
  assert any((a != b).any() for a, b in pairs)
  _equal(jaxrl_llm.load(folder).params, policy.params)
  assert jaxrl_llm.load(folder, step=1).step == 1


def test_an_interrupted_run_raises_and_is_saved(settings, tmp_path):
  calls = []

  def reward(answer):
    calls.append(answer)
    if len(calls) == 40:  # In the first step, after the first evaluation.
      os.kill(os.getpid(), signal.SIGINT)
    return 0.0

  changes = {"reward.name": "interrupts", "reward.workers": 0}
  config = config_lib.method("grpo", **settings | changes)
  with registries.registered():
    register.reward("interrupts", reward)
    with pytest.raises(KeyboardInterrupt, match="SIGINT, saved in"):
      jaxrl_llm.train(config, tmp_path / "run")
  assert jaxrl_llm.load(tmp_path / "run").step < STEPS


class TestGenerate:
  def test_responses_of_each_prompt(self):
    policy = jaxrl_llm.load()
    # As in notebooks, where a number may come from an array.
    how = {"samples": np.int64(3), "max_new_tokens": 8}
    found = policy.generate(["3+5?", "7+5-1?"], **how)
    assert [len(responses) for responses in found] == [3, 3]
    for response in sum(found, []):
      assert len(response["tokens"]) == len(response["logprobs"]) <= 8
      assert policy.tokenizer.decode(response["tokens"]) == response["text"]
      assert response["stop_reason"] in ("finished", "overlong")

  def test_slots_change_nothing_and_the_seed_does(self):
    policy = jaxrl_llm.load()
    how = {"samples": 8, "max_new_tokens": 12}
    ask = lambda **more: policy.generate("3+5-2?", **how, **more)[0]
    texts = lambda **more: [response["text"] for response in ask(**more)]
    assert texts(slots=3) == texts(slots=8) != texts(seed=1)

  def test_a_run_has_its_own_stop_tokens(self, trained, tmp_path):
    folder = shutil.copytree(trained[1], tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config["sampler"]["stop"] = ["1", "2"]
    (folder / "config.json").write_text(json.dumps(config))
    policy = jaxrl_llm.load(folder)
    responses = policy.generate("3+5?", samples=32, max_new_tokens=12)[0]
    texts = [response["text"] for response in responses]
    assert any(text.endswith(("1", "2")) for text in texts)
    assert not any(set(text[:-1]) & {"1", "2"} for text in texts)

  @cases.table("prompts, how, message", _CASES["refusals"])
  def test_refusals(self, prompts, how, message):
    with pytest.raises(ValueError, match=message):
      jaxrl_llm.load().generate(prompts, **how)


class TestEvaluate:
  def test_repeats_the_last_evaluation_of_a_run(self, trained):
    policy, folder = trained
    row = metrics.read_rows(folder / "metrics.jsonl")[-1]
    (results,) = policy.evaluate().values()
    logged = {k.rpartition("/")[2]: v for k, v in row.items() if "eval/" in k}
    assert logged["avg@2"] == results["avg@2"]
    assert logged["response_length_mean"] == results["response_length_mean"]

  def test_fewer_samples_than_the_run_had(self, trained):
    more = {"eval.pass_k": (2,), "eval.samples": 1}
    validate(evaluation.make_config(trained[0], "", more))

  def test_training_files_are_read_only_for_worked_examples(
    self, trained, tmp_path
  ):
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"question": "1+2?", "answer": "3"}))
    gone = {"data.source": "jsonl", "data.path": str(tmp_path / "gone.jsonl")}
    gone["data.settings"] = {}
    assert set(trained[0].evaluate(str(own), **gone)) == {"own"}
    with pytest.raises(InputError, match="gone.jsonl"):
      trained[0].evaluate(str(own), **gone, **{"data.template": "few_shot"})

  def test_a_model_on_files_of_its_own(self, tmp_path):
    files = []
    for name, sums in (("easy", ((1, 2), (3, 4))), ("wrong", ((5, 1),))):
      files.append(str(tmp_path / f"{name}.jsonl"))
      right = 0 if name == "easy" else 1
      rows = [
        {"sum": f"{a}+{b}?", "answer": str(a + b + right)} for a, b in sums
      ]
      pathlib.Path(files[-1]).write_text("\n".join(map(json.dumps, rows)))
    settings = {
      "eval.samples": 2,
      "eval.temperature": 0.0,
      "sampler.max_response_length": 12,
      "data.max_prompt_length": 8,
      "data.columns": {"question": "sum"},
    }
    found = jaxrl_llm.load().evaluate(",".join(files), **settings)
    assert set(found) == {"easy", "wrong"}
    assert found["easy"]["avg@2"] == 1.0 and found["easy"]["pass@2"] == 1.0
    assert found["wrong"]["avg@2"] == 0.0

  @pytest.mark.slow
  def test_the_critic_of_a_run_values_responses(self, trained):
    policy, _ = trained
    config = evaluation.make_config(policy, "", {"eval.samples": 4})
    (found,) = evaluation.evaluations(policy, config, critic=True)
    assert found.values.shape == (4 * found.problems,)
    assert np.unique(found.values).size > found.problems
    results = found.results([])
    assert 0 <= results["best@4"] <= found.results([4])["pass@4"]
    (again,) = evaluation.evaluations(policy, config, critic=True)
    np.testing.assert_array_equal(found.values, again.values)
    (searched,) = evaluation.evaluations(policy, config, search="beam")
    (again,) = evaluation.evaluations(policy, config, search="beam")
    assert searched.judged.texts == again.judged.texts != found.judged.texts
    assert 0 < searched.generated <= searched.values.size * 12
    with pytest.raises(ValueError, match="search='breadth', expected one of"):
      next(evaluation.evaluations(policy, config, search="breadth"))
    config.environment.name, config.sampler.stop = "calculator", ("=",)
    with pytest.raises(InputError, match="search does not support env"):
      next(evaluation.evaluations(policy, config, search="beam"))

  def test_refusals(self, trained):
    policy, _ = trained
    with pytest.raises(InputError, match="has no critic; give a run with"):
      changes = {"estimator.name": "group"}
      config = evaluation.make_config(policy, "", changes)
      list(evaluation.evaluations(policy, config, critic=True))
    with pytest.raises(InputError, match="is a model directory; give the sets"):
      jaxrl_llm.load().evaluate()
    with pytest.raises(InputError, match="eval.path=.* value of the right ty"):
      jaxrl_llm.load().evaluate(["a.jsonl", "b.jsonl"])
    with pytest.raises(InputError, match="eval.smaples: no such key"):
      jaxrl_llm.load().evaluate("chain_sum", **{"eval.smaples": 2})


def test_a_part_of_a_run_is_no_model(trained):
  policy, folder = trained
  for part in ("checkpoints", f"checkpoints/{policy.step}"):
    with pytest.raises(InputError, match="is part of the run .*; give the"):
      jaxrl_llm.load(folder / part)


class TestSave:
  def test_writes_a_directory_that_loads(self, trained, tmp_path):
    policy, _ = trained
    policy.save(tmp_path / "model")
    _equal(models.load(str(tmp_path / "model"))[1], policy.params)
    loaded = jaxrl_llm.load(tmp_path / "model")
    how = {"samples": 2, "max_new_tokens": 6}
    assert loaded.generate("3+5?", **how) == policy.generate("3+5?", **how)

  def test_replaces_only_a_model_of_the_same_architecture(
    self, trained, tmp_path
  ):
    policy, _ = trained
    out, other = tmp_path / "out", jaxrl_llm.load()
    policy.save(out, dtype="bfloat16")
    policy.save(out)
    with pytest.raises(InputError, match="contains another model, whose"):
      other.save(out)
    _equal(jaxrl_llm.load(out).params, policy.params)

  @pytest.mark.parametrize("save", ["save", "save_adapters", "save_critic"])
  def test_leaves_runs_and_the_base_model_alone(self, trained, settings, save):
    policy, folder = trained
    for taken in (settings["model.path"], folder / "base_model", folder):
      with pytest.raises(InputError, match="policy was loaded from"):
        getattr(policy, save)(taken)


def test_load_refuses_what_is_not_there(trained, tmp_path):
  with pytest.raises(InputError, match="no such directory"):
    jaxrl_llm.load(tmp_path / "nothing")
  with pytest.raises(InputError, match="no step 7"):
    jaxrl_llm.load(trained[1], step=7)
  with pytest.raises(InputError, match="not the --workdir of a run"):
    jaxrl_llm.load(step="best")
  assert jaxrl_llm.load().directory == str(base_models.BASE)
