"""scripts/study.py critic: what a critic thinks along a response."""

import csv
import types

import numpy as np
import pytest
import study
from helpers import tiny_run
from studies import critic

from jaxrl_llm.trainer import build, loop
from jaxrl_llm.types import Status


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
    np.where(late, 0.9 * returns, 0.0), returns, mask, correct, [], [], []
  )
  rows = critic.binned(judgement)
  assert [row["explained"] for row in rows[:5]] == pytest.approx([0] * 5)
  assert [row["explained"] for row in rows[5:]] == pytest.approx([0.99] * 5)
  assert rows[-1]["right"] == pytest.approx(0.9)
  assert rows[-1]["wrong"] == pytest.approx(-0.9)


class _Coins:
  """Continuations whose outcome is a coin's until half of the tokens stand."""

  def __init__(self, lengths, right, group_size):
    self.group_size = group_size
    self._lengths, self._right = lengths, right
    self.numbers = []
    self._rng = np.random.default_rng(1)

  def write(self, rollout, weights):
    assert (rollout.status == Status.TRUNCATED).all()
    rows = rollout.group_id
    kept = (rollout.tokens == 1).sum(axis=1)
    np.testing.assert_array_equal(kept, rollout.lengths)
    self.numbers += rollout.sample_id.tolist()
    tossed = self._rng.random(len(rows)) < 0.5
    stands = rollout.lengths >= self._lengths[rows] / 2
    return np.where(stands, self._right[rows], tossed)

  def judge(self, right, prompts):
    assert len(prompts) == len(right)
    rewards = np.where(right, 1.0, -1.0).astype(np.float32)
    return types.SimpleNamespace(
      responses=types.SimpleNamespace(rewards=rewards)
    )


def test_the_ceiling_is_what_the_beginning_of_a_response_decides():
  rollout = tiny_run.random_rollout(
    np.random.default_rng(0), rows=400, room=30, group_size=4
  )
  lengths = np.random.default_rng(2).integers(10, 30, 400).astype(np.int32)
  present = (np.arange(30) < lengths[:, None]).astype(np.int32)
  rollout = rollout.replace(lengths=lengths, tokens=present)
  judged = types.SimpleNamespace(
    responses=types.SimpleNamespace(rollout=rollout), prompts=[None] * 400
  )
  coins = _Coins(lengths, np.arange(400) % 2 == 0, 8)
  found = [critic.ceiling(coins, None, judged, i) for i in range(10)]
  assert found[:4] == pytest.approx([0] * 4, abs=0.05)
  assert found[6:] == pytest.approx([1] * 4)
  assert len(set(coins.numbers)) == len(coins.numbers)
  assert min(coins.numbers) >= 400


@pytest.mark.slow
def test_draws_the_critic_of_a_run(tmp_path, capsys):
  model = tiny_run.write_model(tmp_path / "model")
  config = tiny_run.make_config(model, run__steps=1)
  loop.train(build.make_run(config), tmp_path / "run")
  capsys.readouterr()
  out = tmp_path / "out"
  folder = tmp_path / "run"
  flags = [f"--workdir={folder}", f"--out={out}"]
  assert study.main(["critic", *flags, "--step=1", "--continuations=2"]) == 0
  assert "mean over the places" in capsys.readouterr().out
  with (out / "critic.csv").open() as file:
    ceilings = [row["ceiling"] for row in csv.DictReader(file)]
  assert ceilings == ["nan"] * 10  # A random model is never right.
  assert study.main(["critic", *flags, "--continuations=1"]) == 2
  assert "must be 0 or at least 2" in capsys.readouterr().err
  assert study.main(["critic", *flags, "--step=7"]) == 2
  assert "no step 7; choose from" in capsys.readouterr().err
  assert study.main(["critic", *flags]) == 0
  assert "on 8 held-out responses; wrote critic.png" in capsys.readouterr().out
  with (out / "critic.csv").open() as file:
    assert len(list(csv.DictReader(file))) == 10
  assert (out / "critic.png").read_bytes().startswith(b"\x89PNG")


def test_another_folder_is_one_line(tmp_path, capsys):
  assert study.main(["critic", f"--workdir={tmp_path}"]) == 2
  said = capsys.readouterr().err
  assert said.startswith("study: ") and said.count("\n") == 1
