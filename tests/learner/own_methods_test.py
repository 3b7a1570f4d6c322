"""A user's method is one file: each trains a step through the public API."""

import functools
import json
import pathlib

import numpy as np
import pytest
from helpers import cases, doors, programs, tiny_run
from helpers.registries import registries  # noqa: F401

import jaxrl_llm
from jaxrl_llm import config as config_lib
from jaxrl_llm import metrics
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Auxiliary, make_algorithm, part
from jaxrl_llm.trainer import validation

_PROGRAMS = cases.load("code")


def write(folder, name, text):
  """Writes a plugin; no two tests import files of one name."""
  (folder / f"{name}.py").write_text(text)
  return str(folder / f"{name}.py")


def make_config(model, **changes):
  """Makes the config of a single step without an evaluation."""
  small = {"run__steps": 1, "eval__problems": 0, "run__samples_every": 0}
  return doors.make_config(model, **small | changes)


def train(config, folder, **how):
  """Trains as a user does; returns the last row of metrics."""
  assert jaxrl_llm.train(config, folder, **how).step == config.run.steps
  return metrics.read_rows(folder / "metrics.jsonl")[-1]


@pytest.mark.usefixtures("registries")
class TestOneFile:
  def test_a_member_that_is_trained_and_read(self, model, tmp_path):
    config = make_config(
      model,
      run__plugins=(
        write(tmp_path, "own_probe", _PROGRAMS["own_methods_probe"]),
      ),
      method__use=("probing",),
      run__steps=2,
    )
    train(config, tmp_path / "run")
    first, second = metrics.read_rows(tmp_path / "run" / "metrics.jsonl")[1:]
    assert first["probe/loss"] > 0 and first["probe/grad_norm"] > 0
    assert first["own/probed"] == 0 < second["own/probed"]

  def test_a_function_of_the_notebook(self, model, tmp_path):
    def bolder(algorithm, s, *, coefficient=0.5):
      loss = part(lambda logprobs: -logprobs)
      term = Auxiliary(loss, coefficient, "policy_mask", "token-mean")
      return algorithm.change(auxiliary={"bolder": term})

    config = make_config(model, method__use=("f_tis",))
    row = train(config, tmp_path / "run", use=[bolder])
    assert row["policy/bolder_loss"] > 0
    assert config.method.use == ("f_tis",)  # The caller's is as it was.
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["method"]["use"] == ["f_tis", "bolder"]
    # A cell that is run again, with another setting.
    config.run.steps = 2
    again = functools.partial(bolder, coefficient=0.25)
    assert train(config, tmp_path / "run", use=[again])["step"] == 2

  def test_a_function_of_a_file_of_any_folder(
    self, model, tmp_path, monkeypatch
  ):
    write(tmp_path, "own_by_name", _PROGRAMS["own_methods_surprise"])
    monkeypatch.chdir(tmp_path)
    use = {"method__use": ("xrpo", "own_by_name.py:surprising")}
    row = train(make_config(model, **use), tmp_path / "run")
    assert row["policy/surprise_loss"] > 0 and row["policy/skipped"] == 0
    assert 0 < row["own/longest"] <= 12
    # It is recorded with its folder, so that any folder can resume the run.
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    use = ["xrpo", f"{tmp_path}/own_by_name.py:surprising"]
    assert saved["method"]["use"] == use
    monkeypatch.chdir("/")
    config = make_config(model, method__use=tuple(use), run__steps=2)
    assert train(config, tmp_path / "run")["policy/surprise_loss"] > 0

  def test_a_stage_of_a_batch(self, model, tmp_path):
    use = (
      write(tmp_path, "own_stage", _PROGRAMS["own_methods_stage"]) + ":shorter",
    )
    config = make_config(model, method__use=use)
    assert train(config, tmp_path / "run")["rollout/left_out"] == 1
    config.estimator.name, config.schedule.window = "gae", 4
    said = "config.schedule.window=4: a stage changes complete batches"
    with pytest.raises(InputError, match=said):
      validation.validate(config)


@pytest.mark.slow
def test_the_command_line_names_a_function_of_a_file(model, tmp_path):
  write(tmp_path, "own_on_the_line", _PROGRAMS["own_methods_surprise"])
  write(tmp_path, "own_plugin", _PROGRAMS["own_methods_probe"])
  changes = {"run__steps": 1, "estimator__name": "group"}
  changes |= {"value__pretrain_steps": 0, "loss__nll_coefficient": 0.0}
  _, *flags = tiny_run.flags(model, tmp_path / "run", **changes)
  use = ("own_on_the_line.py:surprising", "probing")
  flags.append(f"--config.method.use={use}")
  vapo = f"--config={pathlib.Path(__file__).parents[2]}/configs/vapo.py"
  flags = [vapo, *flags, "--plugin=own_plugin.py"]
  programs.finish("scripts/train.py", *flags, cwd=tmp_path)
  row = metrics.read_rows(tmp_path / "run" / "metrics.jsonl")[-1]
  assert row["policy/surprise_loss"] > 0 and row["probe/loss"] > 0
  # An evaluation runs the same code, if the user trusts it.
  evaluate = ["scripts/evaluate.py", f"--checkpoint={tmp_path / 'run'}"]
  _, said = programs.finish(*evaluate, code=2)
  assert "own_plugin.py" in said and "own_on_the_line.py" in said
  programs.finish(*evaluate, "--trust_code")


class TestRefusals:
  """What a user may get wrong is one line that names it."""

  def refused(self, model, said, **changes):
    with pytest.raises(InputError, match=said) as caught:
      make_algorithm(make_config(model, **changes))
    assert "\n" not in str(caught.value)

  def test_a_setting_that_there_is_not(self, model):
    config = make_config(model)
    with pytest.raises(InputError, match="config.method.hapo.tua: no such key"):
      config_lib.update(config, {"method.hapo.tua": 0.1})
    with config.unlocked():  # As the settings of another version.
      config.method.hapo.tua = 0.1
    config.method.use = ("hapo",)
    said = "config.method.hapo: no setting 'tua'; choose from tau, sign"
    with pytest.raises(InputError, match=said):
      make_algorithm(config)

  @pytest.mark.parametrize(
    ("text", "said"),
    [
      ("def own(algorithm, s):\n  pass", "it returned None; return an algori"),
      ("def own(algorithm, s):\n  return algorithm.critic", "returned None"),
      ("def own(algorithm):\n  return algorithm", "too many .*its arguments m"),
      (
        "def own(algorithm, s, *, need):\n  return algorithm",
        "missing a required .*'need'.*and others optional",
      ),
      ("own = 3", "has no function 'own'"),
      ("def other(algorithm, s):\n  return algorithm", "has no function 'own'"),
      ("1 / 0", ", line 1: ZeroDivisionError"),
      (
        "def own(algorithm, s):\n  raise ValueError('use a lag')",
        "config.method.use=.*:own.*: use a lag",
      ),
      (
        "def own(algorithm, s):\n  return algorithm.change(mask=())",
        "own.*, line 2: TypeError: .*'mask'",
      ),
    ],
  )
  def test_a_function_that_is_no_method(self, model, tmp_path, text, said):
    name = f"own_wrong_{np.frombuffer(text.encode(), np.uint8).sum()}"
    file = write(tmp_path, name, text)
    self.refused(model, said, method__use=(f"{file}:own",))

  @pytest.mark.parametrize(
    ("use", "field"),
    [
      (("gspo", "cispo"), "policy_loss"),
      (("evpo", "hapo"), "advantages"),  # The second builds on nothing.
      (("hl_gauss", "reinforce_pp"), "critic"),
      (("dars", "dps"), "prompts"),
    ],
  )
  def test_a_method_that_undoes_an_earlier_one(self, model, use, field):
    said = f"{use[1]!r} replaces the {field} that {use[0]!r} chose; use one"
    base = "group" if field in ("prompts", "policy_loss") else "gae"
    self.refused(model, said, method__use=use, estimator__name=base)

  @pytest.mark.parametrize(
    ("base", "use"),
    [
      ("group", ("poise", "xrpo")),
      ("group", ("gspo", "poise")),
      ("gae", ("hl_gauss", "asyppo")),
    ],
  )
  def test_methods_that_build_on_each_other(self, model, base, use):
    config = make_config(model, method__use=use, estimator__name=base)
    assert make_algorithm(config)

  def test_a_file_that_there_is_not(self, model, tmp_path):
    file = tmp_path / "own_nowhere.py"
    said = f"{file}: no such file; give a Python file"
    self.refused(model, said, method__use=(f"{file}:own",))

  @pytest.mark.usefixtures("registries")
  def test_a_function_in_place_of_a_method_of_the_package(
    self, model, tmp_path
  ):
    def gspo(algorithm, s):
      return algorithm

    with pytest.raises(ValueError, match="'gspo' already exists; use another"):
      jaxrl_llm.train(make_config(model), tmp_path / "run", use=[gspo])
