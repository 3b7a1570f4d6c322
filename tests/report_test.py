"""Tests of jaxrl_llm.tools.report and scripts/report.py."""

import builtins
import itertools
import json
import pathlib

import pytest
import report as script
from helpers import html_page, programs

from jaxrl_llm import metrics
from jaxrl_llm.tools import report

_PNG = b"\x89PNG\r\n\x1a\n"
_HOSTILE = "<script>alert(1)</script> & \x1b[31m\n</td>"


class TestSecondsSpent:
  def rows(self, **second):
    return [
      {"step": 0, "time": 50.0, "time/start_s": 30.0, "time/step_s": 10.0}
      | {"time/evaluate_s": 9.0},
      {"step": 1, "time": 60.0, "time/step_s": 10.0, "time/generate_s": 4.0}
      | {"time/update_policy_s": 3.0, "time/compile_s": 2.0},
      {"step": 2, "time": 75.0, "time/step_s": 10.0} | second,
    ]

  def test_sums_to_what_has_passed(self):
    # 2 s of downtime, and 3 s until the resumed run reached its step.
    spent = report.seconds_spent(
      self.rows(**{"time/start_s": 3.0, "time/generate_s": 10.0})
    )
    assert spent == {
      "start": 33.0,
      "evaluate": 9.0,
      "generate": 14.0,
      "update_policy": 3.0,
      "compile": 2.0,
      "other": 2.0,
      "lost": 2.0,
    }
    # Counted from 30 + 10 s before row 0.
    assert sum(spent.values()) == 75 - (50 - 40)
    rows = self.rows(**{"time/start_s": 3.0, "time/generate_s": 10.0})
    assert report.goodput(rows) == 17 / 65

  def test_what_a_sampler_did_meanwhile_counts_once(self):
    both = {"time/generate_s": 8.0, "time/wait_s": 1.0, "time/score_s": 7.0}
    spent = report.seconds_spent(self.rows(**both))
    assert spent["generate"] == 4.0 and spent["wait"] == 1.0
    assert spent["other"] == 1 + 1 + 2 and spent["lost"] == 5.0

  def test_a_clock_that_was_set_back(self):
    rows = self.rows(**{"time/generate_s": 10.0})
    rows[-1]["time"] -= 1e8
    assert report.seconds_spent(rows)["lost"] == 0
    assert 0 < report.goodput(rows) < 1

  def test_of_rows_without_times(self):
    assert sum(report.seconds_spent([{"step": 0}, {"step": 1}]).values()) == 0
    assert report.goodput([{"step": 0}]) == 0


def _make_run(folder: pathlib.Path, seed: int, steps: int = 6) -> pathlib.Path:
  """Writes a run whose critic starts late and whose loss diverges once."""
  clock = itertools.count(1.0, 1.6).__next__
  writer = metrics.JsonlWriter(folder / "metrics.jsonl", clock=clock)
  for step in range(steps):
    row = {
      "reward/mean": step / steps + 0.01 * seed,
      "reward/accuracy": step / steps,
      "policy/entropy": 1 / (1 + step),
      "policy/loss": float("nan") if step == 2 else 0.1,
      "rollout/response_length_mean": 20 + step,
      "rollout/response_length_max": 40 + step,
      "rollout/truncated_fraction": 0.1,
      "policy/clip_fraction_high": 0.01,
      "policy/clip_fraction_low": 0.02,
      "policy/approx_kl": 0.001,
      "time/generate_s": 1.0,
      "time/update_policy_s": 0.5,
      "time/step_s": 1.6,
    }
    if step > 1:
      row["value/explained_variance"] = 0.5
    if step % 2 == 0:
      row |= {"eval/sums/avg@8": 0.4, "eval/sums/avg@8_se": 0.05}
    writer.log(step, row)
  writer.close()
  config = {
    "run": {"seed": seed, "method": "vapo", "note": _HOSTILE},
    "model": {"path": "models/tiny"},
    "data": {},
  }
  (folder / "config.json").write_text(json.dumps(config))
  samples = metrics.JsonlWriter(folder / "samples.jsonl")
  for step in (1, 3):
    sample = metrics.Sample(f"{step}?", _HOSTILE, "1", None, 0.5, 3, "finished")
    samples.append([sample.row(step)])
  samples.close()
  return folder


class TestScript:
  def test_one_run_makes_picture_and_page(self, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = _make_run(tmp_path / "run", seed=0)
    assert script.main([str(folder)]) == 0
    wrote, spent = capsys.readouterr().out.splitlines()
    assert wrote.startswith("wrote ")
    assert spent == (
      "run: 10 s, goodput 94%: generate 6 s, update_policy 3 s, other 1 s"
    )
    assert (folder / "report.png").read_bytes().startswith(_PNG)
    text = (folder / "report.html").read_text()
    page = html_page.Page(text)
    tags = [element["tag"] for element in page.elements]
    (picture,) = [x["src"] for x in page.elements if x["tag"] == "img"]
    assert picture.startswith("data:image/png;base64,")
    # Nothing is loaded, and no response can close its enclosing element.
    assert not {"link", "iframe", "td"} & {*tags}
    assert tags.count("script") == 3 and "src=" not in text.replace(
      'src="data:', ""
    )
    data = json.loads(page.text("data"))
    samples = [dict(zip(data["fields"], values)) for values in data["samples"]]
    assert [data["prompts"][x["prompt"]] for x in samples] == ["1?", "3?"]
    assert samples[1]["response"] == _HOSTILE
    (run,) = data["runs"]
    assert run["settings"]["run.seed"] == 0 and run["seconds"]["other"] > 0
    assert data["defaults"]["run.seed"] == 0
    last = dict(zip(run["names"], run["rows"][-1]))
    assert last["policy/entropy"] == pytest.approx(1 / 6)
    # Only of the last row; the last evaluation was earlier.
    assert last["eval/sums/avg@8"] is None
    assert data["columns"][0] == ["eval/sums/avg@8", "sums avg@8"]
    assert "<h1>run: vapo, tiny, seed 0</h1>" in text
    assert "sums avg@8 0.400 → 0.400 ± 0.050 (steps 0 and 4)" in text

  def test_output_is_beside_runs_of_one_folder_and_here_for_others(self):
    runs = pathlib.Path("runs").resolve()
    assert script._folder(["runs/a", "runs/b"]) == runs
    assert script._folder(["a/run", "b/run"]) == pathlib.Path()

  def test_several_runs_over_each_other(self, tmp_path):
    pytest.importorskip("matplotlib")
    folders = [
      str(_make_run(tmp_path / f"seed{s}", seed=s, steps=5 + s))
      for s in range(3)
    ]
    out = tmp_path / "made" / "here"
    flags = [f"--out={out}", "--panels=accuracy,time,length"]
    assert script.main(folders + flags) == 0
    assert (out / "report.png").read_bytes().startswith(_PNG)
    text = (out / "report.html").read_text()
    runs = json.loads(html_page.Page(text).text("data"))["runs"]
    assert [run["settings"]["run.seed"] for run in runs] == [0, 1, 2]
    assert "start: loading, value pretraining" in text
    assert text.count('<p class="reached">seed') == 3

  def test_without_matplotlib_says_how_to_get_it(self, tmp_path, monkeypatch):
    folder = _make_run(tmp_path / "run", seed=0)
    real = builtins.__import__

    def without(name, *arguments, **options):
      if name.split(".")[0] == "matplotlib":
        raise ImportError(name, name=name)
      return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert ".[plot]" in programs.refused(script.main, folder)


class TestWritePage:
  def test_too_many_tokens_are_left_out_from_the_first_on(
    self, tmp_path, monkeypatch
  ):
    folder = _make_run(tmp_path, seed=0)
    file = metrics.JsonlWriter(folder / "samples.jsonl")
    sample = metrics.Sample("?", "ab", "1", None, 0.5, 2, "finished")
    sample = sample._replace(per_token={"tokens": ["a" * 80, "</script>"]})
    file.append([sample.row(5)] * 3)
    file.close()
    # Two samples of the run have no tokens; two of these three fit.
    monkeypatch.setattr("jaxrl_llm.tools.report.page._MOST_CHARACTERS", 250)
    picture = tmp_path / "curves.png"
    picture.write_bytes(_PNG)
    runs = [report.load_run(folder)]
    report.write_page(runs, picture, tmp_path / "page.html")
    page = html_page.Page((tmp_path / "page.html").read_text())
    assert json.loads(page.text("data"))["left_out"] == 3
    lines = page.text("tokens0").split("\n")[1:-1]
    assert lines[:3] == ["", "", ""]
    assert [json.loads(x)["tokens"][1] for x in lines[3:]] == ["</script>"] * 2


class TestDraw:
  def test_long_run_with_gaps_and_one_point_runs(self, tmp_path):
    pytest.importorskip("matplotlib")
    long = report.Run(
      "long",
      [{"step": s, "reward/mean": s % 7, "time/step_s": 1} for s in range(300)],
      {},
    )
    short = report.Run("short", [{"step": 500, "policy/entropy": 0.0}], {})
    for runs in ([short], [long, short]):
      report.draw(runs, tmp_path / "a.png")
      assert (tmp_path / "a.png").read_bytes().startswith(_PNG)

  def drawn(self, runs, tmp_path, monkeypatch):
    """Plots; returns the labels of the figure's legend and of each panel."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    sheets, save = [], Figure.savefig
    monkeypatch.setattr(
      Figure,
      "savefig",
      lambda sheet, path: (sheets.append(sheet), save(sheet, path)),
    )
    report.draw(runs, tmp_path / "report.png", panels=("reward", "time"))
    (sheet,) = sheets
    legends = [text.get_text() for x in sheet.legends for text in x.get_texts()]
    return sheet, legends

  def test_only_runs_that_differ_in_their_seeds_have_a_mean(
    self, tmp_path, monkeypatch
  ):
    runs = [
      report.load_run(_make_run(tmp_path / f"seed{seed}", seed))
      for seed in (0, 1)
    ]
    _, names = self.drawn(runs, tmp_path, monkeypatch)
    assert names == [
      "seed0: vapo, tiny, seed 0",
      "seed1: vapo, tiny, seed 1",
      "mean of 2 runs",
    ]
    # Settings changed on resume count too.
    (tmp_path / "seed1" / "config_changes.jsonl").write_text(
      '{"step": 3, "changes": {"run.note": ["a", "b"]}}\n'
    )
    runs[1] = report.load_run(tmp_path / "seed1")
    assert runs[1].config["run.note"] == "b"
    sheet, names = self.drawn(runs, tmp_path, monkeypatch)
    assert names[2:] == []
    # The time panel has a curve for each of them, none of them black.
    (axis,) = [x for x in sheet.axes if "Time" in x.get_title(loc="left")]
    colors = [line.get_color() for line in axis.lines if len(line.get_xdata())]
    assert set(colors) == {"C0", "C1"}


def test_the_summary_counts_responses_on_which_the_reward_failed():
  rows = [
    {"step": i, "reward/mean": 0.5, "reward/errors": e}
    for i, e in enumerate((0.0, 1200.0, 34.0))
  ]
  said = metrics.reached(rows)
  assert said.endswith("; the reward failed on 1,234 responses in 2 steps")
  assert "failed" not in metrics.reached(rows[:1])


def test_the_last_line_says_that_evaluations_lack_verdicts():
  rows = [{"step": i, "eval/set/avg@4": 0.5} for i in range(3)]
  for row, share in zip(rows, (0.0, 0.25, 0.1)):
    row["eval/set/unjudged_fraction"] = share
  assert "verdict" not in metrics.reached(rows[:1])
  said = metrics.reached(rows)
  assert said.endswith("; in evaluations up to 25% had no verdict")
