"""scripts/critic.py: what a critic thinks along a response."""

import csv

import critic
import numpy as np
import pytest
from helpers import tiny_run

from jaxrl_llm.train import build, loop


@pytest.mark.parametrize(
  ("question", "text", "at"),
  [
    ("7+5-8?", "7+5=12;12-8=4;#4.", None),
    ("7+5-8?", "7+5=12;12+8=20;#20.", 9),
    ("7+5-8?", "7+5=13;13-8=5;#5.", 5),
    ("7+5-8?", "7+5=12;12-8=4;", None),  # Cut, not wrong.
    ("What is 7+5?", "12", None),  # Of another task.
  ],
)
def test_first_wrong_character(question, text, at):
  assert critic.first_wrong(question, text) == at


def test_explained_variance_by_position():
  # Outcomes show in the second half of a response, of whatever length.
  rng = np.random.default_rng(0)
  correct = rng.random(400) < 0.5
  lengths = rng.integers(10, 30, 400)
  mask = np.arange(30) < lengths[:, None]
  returns = np.where(correct, 1.0, -1.0)[:, None] * np.ones((1, 30))
  late = np.arange(30) >= lengths[:, None] / 2
  judgement = critic.Judgement(
    np.where(late, 0.9 * returns, 0.0), returns, mask, correct, [], []
  )
  rows = critic.binned(judgement)
  assert [row["explained"] for row in rows[:5]] == pytest.approx([0] * 5)
  assert [row["explained"] for row in rows[5:]] == pytest.approx([0.99] * 5)
  assert rows[-1]["right"] == pytest.approx(0.9)
  assert rows[-1]["wrong"] == pytest.approx(-0.9)


@pytest.mark.slow
def test_draws_the_critic_of_a_run(tmp_path, capsys):
  model = tiny_run.write_model(tmp_path / "model")
  config = tiny_run.make_config(model, run__steps=1)
  loop.train(build.make_run(config), tmp_path / "run")
  capsys.readouterr()
  out = tmp_path / "out"
  folder = tmp_path / "run"
  assert critic.main([f"--workdir={folder}", f"--out={out}"]) == 0
  assert "on 8 held-out responses; wrote critic.png" in capsys.readouterr().out
  with (out / "critic.csv").open() as file:
    assert len(list(csv.DictReader(file))) == 10
  assert (out / "critic.png").read_bytes().startswith(b"\x89PNG")


def test_another_folder_is_one_line(tmp_path, capsys):
  assert critic.main([f"--workdir={tmp_path}"]) == 2
  said = capsys.readouterr().err
  assert said.startswith("critic: ") and said.count("\n") == 1
