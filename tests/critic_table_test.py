"""Tests of `scripts/study.py critic`: accuracy of critics and its ceiling."""

import csv
import json
import types

import numpy as np
import pytest
import study
from helpers import cases, tiny_run
from studies import critic, truth

from jaxrl_llm import api
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.environments import Observation
from jaxrl_llm.trainer import build, loop
from jaxrl_llm.types import Origin, Status

_CASES = cases.load("critic")


@cases.table("question, text, at", _CASES["first_wrong_character"])
def test_first_wrong_character(question, text, at):
  assert critic.first_wrong(question, text) == at


def test_states_are_spread_over_the_tokens_of_the_policy():
  rollout = tiny_run.random_rollout(np.random.default_rng(0), rows=3, room=12)
  origin = np.zeros_like(rollout.origin)
  origin[1, 2:5] = origin[1, 7:8] = Origin.FOREIGN  # Two observations.
  rollout = rollout.replace(
    lengths=np.array([12, 10, 2], np.int32), origin=origin
  )
  states = truth.find_states(rollout, [0, 1, 2], 4)
  of = lambda row, name: getattr(states, name)[states.row == row].tolist()
  assert of(0, "at") == [1, 4, 7, 10]
  assert of(0, "position") == pytest.approx([1.5 / 12, 0.375, 0.625, 0.875])
  # The policy wrote tokens 0, 1, 5, 6, 8, 9; states are never in observations.
  assert of(1, "at") == [0, 5, 6, 9]
  assert of(1, "turn") == [0, 1, 1, 2]
  assert of(2, "at") == [0, 1]  # No duplicate states.


class _Coins:
  """Continuations with random outcomes until half of the tokens are given."""

  turn_taking = None

  def __init__(self, rollout, right, group_size):
    self.group_size = group_size
    self._rollout, self._right = rollout, right
    self.numbers, self.groups = [], []
    self._rng = np.random.default_rng(1)

  def write(self, rollout, weights, conversations):
    assert (rollout.status == Status.TRUNCATED).all()
    assert not rollout.mask.any()  # Given tokens share a prefill.
    self.numbers += rollout.sample_id.tolist()
    self.groups += rollout.group_id.tolist()
    kept = np.arange(rollout.tokens.shape[1]) < rollout.lengths[:, None]
    assert not rollout.tokens[~kept].any()
    new = ~kept & (np.arange(kept.shape[1]) < rollout.lengths[:, None] + 3)
    return rollout.replace(mask=new, lengths=rollout.lengths + 3)

  def judge(self, rollout, prompts, conversations):
    rows, count = np.asarray(prompts), len(prompts)
    # The prefix has the response's mask again.
    own = self._rollout.mask[rows] & (
      np.arange(rollout.mask.shape[1]) < rollout.lengths[:, None] - 3
    )
    np.testing.assert_array_equal(rollout.mask & own, own)
    tossed = self._rng.random(count) < 0.5
    stands = rollout.lengths - 3 >= self._rollout.lengths[rows] / 2
    right = np.where(stands, self._right[rows], tossed)
    rewards = np.where(right, 1.0, -1.0).astype(np.float32)
    responses = types.SimpleNamespace(
      rewards=rewards, judged=np.ones(count, bool)
    )
    return types.SimpleNamespace(responses=responses)


def _tossed():
  """States of 400 responses, continued by `_Coins`."""
  rollout = tiny_run.random_rollout(
    np.random.default_rng(0), rows=400, room=33, group_size=4
  )
  lengths = np.random.default_rng(2).integers(10, 30, 400).astype(np.int32)
  rollout = rollout.replace(lengths=lengths, mask=np.ones((400, 33), bool))
  judged = types.SimpleNamespace(
    responses=types.SimpleNamespace(rollout=rollout), prompts=np.arange(400)
  )
  coins = _Coins(rollout, np.arange(400) % 2 == 0, 8)
  states = truth.find_states(rollout, range(400), 10)
  returns, tokens = truth.continue_from(
    states, coins, None, judged, lambda responses, at: responses.rewards, 400
  )
  return states._replace(returns=returns), tokens, coins


def test_the_ceiling_is_what_the_beginning_of_a_response_decides():
  states, tokens, coins = _tossed()
  assert tokens == 3 * states.returns.size
  assert len(set(coins.numbers)) == len(coins.numbers) == states.returns.size
  assert min(coins.numbers) >= 400
  assert np.bincount(coins.groups).tolist() == [8] * len(states.at)
  right = np.where(np.arange(400) % 2 == 0, 1.0, -1.0)[states.row]
  known = np.where(states.position > 0.5, 0.9 * right, 0.0)
  critics = {"good": known, "blind": 0 * known, "high": known + 0.5}
  rows = critic.tabulate(states, states.row // 4, critics, 10)
  own = [row for row in rows if row["by"] == "position"]
  column = lambda name: [row[name] for row in own]
  assert column("group") == pytest.approx(np.arange(10) / 10 + 0.05)
  assert column("ceiling")[:4] == pytest.approx([0] * 4, abs=0.05)
  assert column("ceiling")[6:] == pytest.approx([1] * 4)
  assert column("good explained")[6:] == pytest.approx([0.99] * 4)
  assert column("good rank")[6:] == pytest.approx([1] * 4)
  assert column("high explained") == pytest.approx(column("good explained"))
  assert column("high bias")[6:] == pytest.approx([0.5] * 4, abs=0.02)
  assert column("blind explained") == pytest.approx([0] * 10, abs=1e-6)
  assert np.isnan(column("blind rank")).all()
  whole = rows[0]
  assert (whole["by"], whole["states"]) == ("all", len(states.at))
  assert 0.4 < whole["good explained"] < whole["ceiling"] < 0.7


def test_quarters_of_problems_from_hard_to_easy():
  returns = np.repeat([[0.0], [0.25], [0.5], [1.0]], 6, axis=0)
  returns = np.concatenate([returns, returns], axis=1)
  count = len(returns)
  problems = np.repeat([7, 3, 5, 1], 6)
  zeros = np.zeros(count, int)
  states = truth.States(zeros, zeros, zeros / 1.0, zeros, returns)
  rows = critic.tabulate(states, problems, {}, 2)
  found = [
    (row["group"], row["states"], row["truth"])
    for row in rows
    if row["by"] == "difficulty"
  ]
  assert found == [(1, 6, 0.0), (2, 6, 0.25), (3, 6, 0.5), (4, 6, 1.0)]


def test_turns_of_a_prefix_are_played_again():
  rollout = tiny_run.random_rollout(np.random.default_rng(0), rows=3, room=9)
  origin = np.zeros_like(rollout.origin)
  origin[:, 2:4] = origin[:, 6:7] = Origin.FOREIGN
  rollout = rollout.replace(
    lengths=np.array([1, 5, 8], np.int32), origin=origin
  )
  seen = []

  def call(calls):
    seen.append([x["response"] for x in calls])
    return [
      (
        Observation("ok", rewards={"points": 1.0})._asdict()
        | {"state": x["state"] + 1},
        None,
      )
      for x in calls
    ]

  config = types.SimpleNamespace(
    begin=lambda prompt: json.dumps({"state": 0, "turns": 0, "rewards": {}}),
    tokenizer=types.SimpleNamespace(decode=lambda tokens: tokens.tolist()),
    call=call,
  )
  found = truth.replay(config, rollout, [None] * 3)
  found = [json.loads(found[str(i)]) for i in rollout.sample_id]
  assert [x["turns"] for x in found] == [0, 1, 2]
  assert [x["state"] for x in found] == [0, 1, 2]
  assert found[2]["rewards"] == {"points": 2.0}
  tokens = rollout.tokens.tolist()
  assert seen == [[tokens[1][:2], tokens[2][:2]], [tokens[2][4:6]]]
  config.call = lambda calls: [(None, "late")] * len(calls)
  with pytest.raises(InputError, match="failed on a known turn: late"):
    truth.replay(config, rollout, [None] * 3)


@pytest.mark.slow
def test_scores_the_critics_of_runs_and_folders(model, tmp_path, capsys):
  settings = {"run__steps": 1, "value__reads_logprobs": False}
  config = tiny_run.make_config(model, **settings)
  folder = tmp_path / "run"
  loop.train(build.make_run(config), folder)
  api.load(folder).save_critic(tmp_path / "critic")
  capsys.readouterr()
  out = tmp_path / "out"
  flags = [f"--workdir={folder}", f"--out={out}", "--continuations=2"]
  flags += ["--positions=3", f"--critics={folder},{folder}:1,{tmp_path}/critic"]
  assert study.main(["critic", *flags, "--step=1", "--tokens=1"]) == 0
  first = (out / "truth.jsonl").read_bytes()
  assert "wrote critic.png and critic.csv" in capsys.readouterr().out
  assert study.main(["critic", *flags, "--step=1"]) == 0
  assert (out / "truth.jsonl").read_bytes().startswith(first)
  with (out / "critic.csv").open() as file:
    rows = list(csv.DictReader(file))
  # The exported critic equals the checkpoint's critic.
  one, other = (f"{x} bias" for x in (f"{folder}:1", f"{tmp_path}/critic"))
  assert [row[one] for row in rows] == [row[other] for row in rows]
  assert (out / "critic.png").read_bytes().startswith(b"\x89PNG")
  assert study.main(["critic", *flags]) == 2  # Other policy.
  assert "another policy or setting" in capsys.readouterr().err
  assert study.main(["critic", *flags, "--step=7"]) == 2
  assert "no step 7; choose from" in capsys.readouterr().err
  flags = [f"--workdir={model}", "--config=grpo", f"--out={tmp_path / 'of'}"]
  flags += ["--set=eval.problems=2", "--set=sampler.max_response_length=8"]
  assert study.main(["critic", *flags, "--positions=2"]) == 0
  assert "at most" in capsys.readouterr().out


def test_a_chunk_of_states_whose_rewards_all_failed_is_left_out():
  failed = dict.fromkeys(truth.States._fields, [])
  judged = truth.States([3], [5], [0.5], [0], [[0.0, 1.0]])._asdict()
  assert truth.join([failed, judged]).returns.tolist() == [[0.0, 1.0]]
  for chunks in ([], [failed]):
    with pytest.raises(InputError, match="no state has .* raise --tokens"):
      truth.join(chunks)


def test_returns_that_do_not_vary_have_no_ceiling():
  assert np.isnan(critic.ceiling(np.ones((3, 2))))
