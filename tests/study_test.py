"""Tests of scripts/study.py and scripts/studies/."""

import argparse
import itertools
import json
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import study as script
from helpers import configs, programs
from studies import results
from studies.tables import STUDIES, Study, Variant

from jaxrl_llm.errors import InputError
from jaxrl_llm.tools.report.figure import band
from jaxrl_llm.trainer.validation import validate

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_CURVES_OF_DOCS = _ROOT / "docs" / "studies"


def _resolved(study, variant) -> dict:
  """Returns the flattened, validated config of a variant."""
  config = configs.load(variant.method, study.preset)
  changes = {k: configs.value(x) for k, x in variant.changes.items()}
  config.update_from_flattened_dict(changes)
  validate(config)
  return configs.resolved(config)


def _rows(accuracies, *, seconds=2.0, tokens=100.0, decode_steps=20.0):
  """Makes rows of a run evaluated at step 0 and at every second step."""
  rows = [{"step": 0, "eval/test_set/avg@2": accuracies[0]}]
  for step in range(1, 2 * len(accuracies) - 1):
    row = {
      "step": step,
      "rollout/tokens": tokens,
      "rollout/decode_steps": decode_steps,
      "time/step_s": seconds,
      "time/generate_s": 0.5 * seconds,
      "time/update_policy_s": 0.25 * seconds,
    }
    if step % 2 == 0:
      row["time/step_s"] += 10.0
      row |= {"time/evaluate_s": 7.0, "time/checkpoint_s": 3.0}
      row["eval/test_set/avg@2_se"] = 0.01
      row["eval/test_set/avg@2"] = accuracies[step // 2]
      row["eval/test_set/pass@2"] = 1.0
    rows.append(row)
  return rows


_STUDY = Study(
  title="Two variants",
  question="Which is faster?",
  preset="",
  variants=(Variant("slow", "ppo"), Variant("quick", "ppo")),
  target=0.5,
)


def test_an_outcome_counts_training_alone():
  outcome = results.outcome(_rows([0.1, 0.4, 0.6, 0.3]))
  np.testing.assert_array_equal(outcome.steps, [0, 2, 4, 6])
  np.testing.assert_array_equal(outcome.seconds, [0, 4, 8, 12])
  np.testing.assert_array_equal(outcome.tokens, [0, 200, 400, 600])
  np.testing.assert_array_equal(outcome.accuracy, [0.1, 0.4, 0.6, 0.3])
  # The target is reached at the first evaluation over it.
  axes = ("seconds", "tokens", "decode_steps")
  assert [outcome.at_target(axis, 0.5) for axis in axes] == [8.0, 400.0, 80.0]
  assert np.isnan([outcome.at_target(axis, 0.95) for axis in axes]).all()
  begun = results.outcome([{"step": 1, "time/step_s": 1.0}])
  assert begun.accuracy.shape == (0,)
  assert np.isnan(begun.at_target("seconds", 0.5))


def test_mean_and_error_golden():
  found = [
    results.mean_and_error(values, ".2f")
    for values in ([1.0, 2.0, 6.0], [2.0], [], [1.0, np.nan])  # √7 / √3.
  ]
  assert found == ["3.00 ± 1.53", "2.00", "-", "-"]


class TestWriteTable:
  def _cells(self, tmp_path, outcomes):
    text = results.write_table(_STUDY, outcomes, tmp_path / "table.md")
    assert (tmp_path / "table.md").read_text("utf-8") == text
    table = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in table]
    assert {len(row) for row in cells} == {len(cells[0])}
    assert set(cells[1]) == {"---"}
    return [dict(zip(cells[0], row)) for row in cells[2:]]

  def test_ratio_is_to_the_baseline(self, tmp_path):
    outcomes = {
      "slow": [results.outcome(_rows([0.1, 0.2, 0.6], seconds=4.0))] * 2,
      "quick": [results.outcome(_rows([0.1, 0.6, 0.5], seconds=3.0))] * 2,
    }
    slow, quick = self._cells(tmp_path, outcomes)
    assert [slow["variant"], quick["variant"]] == ["slow", "quick"]
    assert [slow["s to 0.5"], quick["s to 0.5"]] == ["16 ± 0", "6 ± 0"]
    assert [slow["ratio"], quick["ratio"]] == ["1.00", "0.38"]
    assert quick["decode steps to 0.5"] == "40 ± 0"
    assert [slow["their ratio"], quick["their ratio"]] == ["1.00", "0.50"]
    assert quick["final accuracy"] == "0.500 ± 0.000"
    assert quick["mean accuracy"] == "0.550 ± 0.000"
    cells = {"seeds": "2", "steps": "4", "seconds": "12 ± 0"}
    cells |= {"generate": "50%", "update_policy": "25%", "update_value": "0%"}
    assert cells.items() <= quick.items()

  def test_lead_is_over_the_same_seed(self, tmp_path):
    outcomes = {
      "slow": [
        results.outcome(_rows([0.1, 0.2, 0.4])),
        results.outcome(_rows([0.1, 0.3, 0.5]))._replace(seed=1),
      ],
      # Twice the tokens: it reaches 0.3 and 0.5 at 100 and 200 tokens.
      "quick": [
        results.outcome(_rows([0.1, 0.5, 0.7], tokens=200.0))._replace(seed=1),
        results.outcome(_rows([0.1, 0.9]))._replace(seed=2),  # Unpaired.
      ],
    }
    slow, quick = self._cells(tmp_path, outcomes)
    assert [slow["lead by steps"], slow["by tokens"]] == ["-", "-"]
    assert quick["lead by steps"] == "+0.200"
    assert quick["by tokens"] == "+0.000"

  def test_dashes_stand_for_what_was_not_reached_or_counted(self, tmp_path):
    run = lambda *accuracies, **how: results.outcome(_rows(accuracies, **how))
    good, bad, at_once = run(0.1, 0.6), run(0.1, 0.2), run(0.9, 0.9)
    old = run(0.1, 0.6, decode_steps=0.0)  # Not counted.
    begun = results.outcome([{"step": 1, "time/step_s": 1.0}])
    ratio = "ratio"
    for slow, quick, dashes in (
      ([good], [good, bad], ((), ("s to 0.5", ratio))),
      ([bad], [good], ((ratio,), (ratio,))),
      ([at_once], [begun], ((ratio,), (ratio, "final accuracy", "tokens (M)"))),
      ([old], [good], (("decode steps to 0.5", "their ratio"), ())),
    ):
      rows = self._cells(tmp_path, {"slow": slow, "quick": quick})
      for row, names in zip(rows, dashes, strict=True):
        assert all(row[name] == "-" for name in names)
        assert ratio in names or row[ratio] == "1.00"

  def test_reads_the_curves_that_it_wrote(self, tmp_path):
    run = results.outcome(_rows([0.1, 0.25]))
    outcomes = {"quick": [run], "slow": [run, run._replace(seed=7)]}
    results.write_curves({"quick": [run]}, tmp_path / "a.csv")
    results.write_curves({"slow": outcomes["slow"][::-1]}, tmp_path / "b.csv")
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    read = results.read_curves(_STUDY, files)
    assert list(read) == ["slow", "quick"]  # In the study's order.
    assert [each.seed for each in read["slow"]] == [0, 7]
    for name, runs in read.items():
      for one, other in zip(runs, outcomes[name], strict=True):
        np.testing.assert_allclose(one[:5], other[:5], rtol=1e-5)
    assert "generate" not in self._cells(tmp_path, read)[0]


def _curves(outcomes, axis):
  return [(getattr(outcome, axis), outcome.accuracy) for outcome in outcomes]


def test_a_band_interpolates_and_ends_with_the_shortest():
  short = results.outcome(_rows([0.0, 0.5], seconds=1.0))
  long = results.outcome(_rows([0.0, 0.5, 1.0], seconds=2.0))
  x, mean, error = band(_curves([short, long], "seconds"))
  assert (x[0], x[-1]) == (0.0, 2.0)
  # Slopes of 0.5 in 2 s and of 0.5 in 4 s.
  np.testing.assert_allclose(mean, (x / 4 + x / 8) / 2, atol=1e-12)
  # Two values that differ by d have a standard error of d / 2.
  np.testing.assert_allclose(error, (x / 4 - x / 8) / 2, atol=1e-12)
  begun = results.outcome([{"step": 1}])  # No evaluation counts for nothing.
  x, mean, error = band(_curves([short, begun], "steps"))
  assert (x[-1], mean[0], mean[-1]) == (2.0, 0.0, 0.5) and not error.any()
  assert [a.size for a in band(_curves([begun], "tokens"))] == [0, 0, 0]


class TestStudies:
  @pytest.mark.parametrize("study", STUDIES.values())
  def test_variants_are_valid_and_differ(self, study, tmp_path):
    found = [_resolved(study, variant) for variant in study.variants]
    for one, other in itertools.combinations(found, 2):
      assert configs.differing(one, other)
    names = [variant.name for variant in study.variants]
    folders = {results.run_folder(tmp_path, name, 0) for name in names}
    assert len(folders) == len(names) and {*study.drawn} <= {*names}

  def test_a_run_is_trained_with_the_settings_of_its_variant(self, tmp_path):
    study = STUDIES["tries"]
    run = script.command(study, study.variants[-1], 3, tmp_path, ["--x"])
    assert run[1:] == [
      str(_ROOT / "scripts" / "train.py"),
      f"--workdir={tmp_path / 'DARS__hard' / 'seed3'}",
      "--config=dars:",
      "--config.run.steps=40",
      "--config.eval.every=10",
      "--config.data.prompts_per_step=28",
      "--config.data.group_size=4",
      "--config.optimizer.policy.mini_batch=0",
      "--config.method.dars.signal=hard",
      "--config.run.seed=3",
      "--x",
    ]

  def test_a_plugin_goes_to_every_run(self, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(script, "run_all", lambda *a: given.append(a[-1]))
    name = next(iter(STUDIES))
    flags = [f"--out={tmp_path}", "--plugin=my.py", "--config.run.steps=1"]
    assert script.main([name, *flags]) == 2  # There are no runs.
    plugin = f"--plugin={pathlib.Path('my.py').resolve()}"
    assert given == [["--config.run.steps=1", plugin]]

  def test_dapo_is_reached_one_part_at_a_time(self):
    study = STUDIES["dapo_increments"]
    arms = [_resolved(study, variant) for variant in study.variants]
    steps = [configs.differing(a, b) for a, b in zip(arms, arms[1:])]
    assert steps == [
      {"loss.overlong_filter"},
      {"loss.clip_high"},
      # The punishment replaces the filter.
      {"loss.overlong_filter", "reward.overlong_buffer"},
      {"loss.mode"},
      {"schedule.dynamic_sampling"},
    ]


def _write_run(workdir, *, steps, logged, tail=""):
  workdir.mkdir(parents=True, exist_ok=True)
  (workdir / "config.json").write_text(json.dumps({"run": {"steps": steps}}))
  rows = [{"step": 0, "eval/x/avg@2": 0.1}]
  rows += [{"step": s, "time/step_s": 1.0} for s in range(1, logged + 1)]
  rows[-1]["eval/x/avg@2"] = 0.8
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (workdir / "metrics.jsonl").write_text(lines + tail)


class TestScript:
  def test_a_run_is_done_at_its_last_step_with_the_same_settings(
    self, tmp_path
  ):
    assert not script.is_done(tmp_path / "none", [])
    _write_run(tmp_path / "part", steps=3, logged=2, tail='{"step": 3, "rew')
    assert not script.is_done(tmp_path / "part", [])
    _write_run(tmp_path / "all", steps=3, logged=3)
    assert script.is_done(tmp_path / "all", [])
    (tmp_path / "all" / "settings.json").write_text('["--config=a"]')
    assert script.is_done(tmp_path / "all", ["--config=a"])
    with pytest.raises(InputError, match="other settings"):
      script.is_done(tmp_path / "all", ["--config=a", "--config.x=1"])

  def test_report_of_the_runs_so_far(self, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    study = STUDIES["tppo_speed"]
    folder = tmp_path / "tppo_speed"
    for variant, seed in ((study.variants[0], 0), (study.variants[0], 1)):
      workdir = results.run_folder(folder, variant.name, seed)
      _write_run(workdir, steps=9, logged=3 + seed)
    begun = results.run_folder(folder, study.variants[1].name, 0)
    begun.mkdir(parents=True)
    (begun / "metrics.jsonl").touch()  # It pretrains its critic.
    arguments = ["tppo_speed", f"--out={tmp_path}", "--report"]
    assert script.main(arguments) == 0
    assert (folder / "curves.png").exists()
    table = (folder / "table.md").read_text("utf-8")
    assert f"| {study.variants[0].name} | 2 | 3 | 0.800" in table
    assert study.variants[1].name + " |" not in table
    assert str(folder) in capsys.readouterr().out

  @pytest.mark.parametrize("name", STUDIES)
  def test_tables_of_the_docs_are_made_of_their_curves(self, tmp_path, name):
    file = _CURVES_OF_DOCS / f"{name}.csv"
    if name in ("staleness", "tppo_speed"):  # Without and with several curves.
      pytest.importorskip("matplotlib")
      flags = f"--curves={file}", f"--out={tmp_path}"
      assert script.main([name, *flags]) == 0
      assert (tmp_path / name / "curves.png").exists()
    elif file.exists():
      read = results.read_curves(STUDIES[name], [file])
      table = results.write_table(STUDIES[name], read, tmp_path / "table.md")
      assert STUDIES[name].baseline in table

  def test_the_first_of_some_variants_is_the_baseline(self, tmp_path):
    pytest.importorskip("matplotlib")
    flags = [f"--curves={_CURVES_OF_DOCS / 'credit.csv'}", f"--out={tmp_path}"]
    assert script.main(["credit", *flags, "--variants=GRPO;DAPO"]) == 0
    table = (tmp_path / "credit" / "table.md").read_text("utf-8")
    *_, grpo, dapo = [line for line in table.splitlines() if "PO |" in line]
    assert grpo.startswith("| GRPO |") and "| - | - |" in grpo
    assert dapo.startswith("| DAPO |") and "| - | - |" not in dapo
    assert "| VAPO" not in table
    assert "VAPO" not in (tmp_path / "credit" / "curves.csv").read_text("utf-8")

  def test_a_run_that_fails_says_where_to_look(self, tmp_path):
    arguments = ["vapo_ablations", "--variants=VAPO", "--seeds=0"]
    arguments += [f"--out={tmp_path}", "--config.run.stesp=3"]
    error = programs.refused(script.main, *arguments)
    assert "exit code 2" in error
    log = pathlib.Path(error.strip().rpartition("see ")[2])
    assert "run.steps" in log.read_text("utf-8")


_TINY = {"data.source": "chain_sum", "data.settings": {"max_ops": 2}}
_TINY |= {"data.prompts_per_step": 2, "data.group_size": 4}
_TINY |= {"data.max_prompt_length": 12, "sampler.max_response_length": 24}
_TINY |= {f"optimizer.{x}.mini_batch": 8 for x in ("policy", "value")}
_TINY |= {"optimizer.max_tokens_per_row": 0, "value.pretrain_steps": 1}
_TINY |= {"eval.problems": 4, "eval.every": 1, "run.trackers": "()"}
_TINY |= {"run.steps": 60, "checkpoint.every": 1000}


class TestSweep:
  def _study(self, *flags):
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    script.add_flags(parser)
    return script.find_study(parser.parse_args(["mine", *flags]))

  def test_is_the_product_of_its_values(self, tmp_path):
    rate = "optimizer.policy.learning_rate"
    sweep = [f"--sweep={rate}=1e-5,2e-5", "--sweep=run.steps=3,4"]
    study = self._study("--config=grpo:gsm8k", *sweep)
    assert [dict(variant.changes) for variant in study.variants] == [
      {rate: a, "run.steps": b} for a in ("1e-5", "2e-5") for b in ("3", "4")
    ]
    assert study.baseline == f"{rate}=1e-5, run.steps=3"
    run = script.command(study, study.variants[1], 0, tmp_path, [])
    assert "--config=grpo:gsm8k" in run
    assert {f"--config.{rate}=1e-5", "--config.run.steps=4"} < set(run)

  def test_unfinished_runs_are_trained_seed_by_seed(
    self, tmp_path, monkeypatch
  ):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)  # --out is relative to it.
    trained = []

    def train(run, log_file):
      folder = log_file.parent
      assert f"--workdir={folder.resolve()}" in run
      trained.append(str(folder.relative_to("out/mine")))
      _write_run(folder, steps=3, logged=3)
      return 0

    monkeypatch.setattr(script, "train", train)
    flags = ["--config=grpo", "--sweep=data.group_size=1,2", "--seeds=0,1"]
    for _ in range(2):  # The second time, there is nothing to do.
      assert script.main(["mine", *flags, "--out=out"]) == 0
      assert trained == [
        f"data_group_size_{size}/seed{seed}"
        for seed in (0, 1)
        for size in (1, 2)
      ]
    table = pathlib.Path("out/mine/table.md").read_text("utf-8")
    assert "| data.group_size=2 | 2 | 3 |" in table


@pytest.mark.slow
def test_a_stopped_study_saves_and_goes_on(tmp_path, monkeypatch):
  monkeypatch.setenv("PYTHONPATH", str(_ROOT))
  monkeypatch.setenv("XLA_FLAGS", programs.FLAGS)
  chosen = ["vapo_ablations", "--variants=VAPO", "--seeds=0"]
  chosen += [f"--out={tmp_path}"]
  flags = [f"--config.{key}={value}" for key, value in _TINY.items()]
  process = subprocess.Popen(
    [sys.executable, "scripts/study.py", *chosen, *flags],
    cwd=_ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  workdir = tmp_path / "vapo_ablations" / "VAPO" / "seed0"
  rows = workdir / "metrics.jsonl"
  programs.wait_until(
    lambda: rows.exists() and rows.read_text().count("\n") >= 3, "a step"
  )
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate(timeout=120)
  assert process.returncode == 128 + signal.SIGINT
  assert "run the same command to continue" in output
  log = (workdir / "log.txt").read_text("utf-8")
  assert "stopped by SIGINT" in log and "saved" in log
  assert script.main([*chosen, "--report"]) == 0
  table = (workdir.parents[1] / "table.md").read_text("utf-8")
  assert "| VAPO | 1 |" in table


def test_without_a_name_all_are_listed(capsys):
  with pytest.raises(SystemExit) as exit:
    script.main([])
  assert exit.value.code == 2
  assert f"give a NAME: {', '.join(STUDIES)}" in capsys.readouterr().err
