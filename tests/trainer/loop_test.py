"""A tiny run resumes exactly, stops cleanly and never trains on NaN."""

import copy
import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import shutil
import signal
import types

import chex
import jax
import numpy as np
import pytest
from helpers import tiny_run
from helpers.tiny_run import with_config
from helpers.tiny_tppo import newest

from jaxrl_llm import metrics, models
from jaxrl_llm import workdir as workdir_lib
from jaxrl_llm.checkpoint import commit
from jaxrl_llm.errors import InputError, TrainingStopped
from jaxrl_llm.evaluate import Evaluation
from jaxrl_llm.learner import metrics as learner_metrics
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.rewards.verdict import Verdict
from jaxrl_llm.rollout.writer import Weights
from jaxrl_llm.system import signals
from jaxrl_llm.tools import report
from jaxrl_llm.trainer import build, loop
from jaxrl_llm.trainer.value_pretraining import CHECKPOINTS, FOLDER
from jaxrl_llm.trainer.workdir import Workdir

# Estimations in value pretraining: two for training, one at the end.
PRETRAINED = 3


@pytest.fixture(scope="module")
def run(model):
  """One run for all tests, so that programs are compiled once."""
  config = tiny_run.make_config(model, run__trackers=("tensorboard",))
  return build.make_run(config)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
  """Folder of an uninterrupted run."""
  workdir = tmp_path_factory.mktemp("whole")
  loop.train(run, str(workdir))
  return workdir


def pretraining_rows(workdir):
  rows = metrics.read_rows(workdir / "value_pretrain.jsonl")
  return [row | {"time": 0} for row in rows]


def assert_same_run(run, whole, resumed):
  assert tiny_run.comparable(resumed) == tiny_run.comparable(whole)
  tiny_run.assert_same_checkpoints(run, whole, resumed)


def estimating(run, change):
  """Returns the run whose learners continue with `change(experience)`."""

  def changed(learner):
    changed = copy.copy(learner)
    experience = lambda *a, **b: change(learner._experience(*a, **b))
    vars(changed)["_experience"] = experience
    return changed

  pretraining = dataclasses.replace(
    run.pretraining, learner=changed(run.pretraining.learner)
  )
  return dataclasses.replace(
    run, learner=changed(run.learner), pretraining=pretraining
  )


def interrupting(run, number, action):
  """Returns the run with `action` called during the `number`-th estimation."""
  count = 0

  def change(experience):
    nonlocal count
    count += 1
    return (action(experience) if count == number else None) or experience

  return estimating(run, change)


def poison(experience):
  experience["advantages"] = experience["advantages"] * np.nan
  return experience


class TestRun:
  def test_rows(self, whole):
    rows = tiny_run.comparable(whole)
    assert [row["step"] for row in rows] == list(range(7))
    evaluated = [row["step"] for row in rows if "eval/chain_sum/avg@2" in row]
    assert evaluated == [0, 3, 6]
    assert any(row["reward/std"] > 0 for row in rows[1:])
    assert any(row["policy/nll_loss"] > 0 for row in rows[1:])
    for row in rows[1:]:
      # Sampler and trainer agree on the same tokens.
      assert row["sampler_trainer/logprob_diff_max"] <= 1e-5
      assert row["policy/skipped"] == row["value/skipped"] == 0
      assert row["policy/grad_norm"] > 0 and row["value/grad_norm"] > 0
      assert row["policy/ratio_max"] > 1

  def test_the_states_at_the_end(self, run, whole):
    states, _ = newest(run, whole)
    assert states.step == 6
    assert (states.source.position, states.source.drawn) == (48, 48)
    assert states.rollout.samples == 6 * 32
    # In a full schedule, every response has ended and been trained on.
    assert states.rollout.store is None and states.learner.waiting is None

  def test_the_time_is_accounted_for(self, run, tmp_path):
    loop.train(with_config(run, run__steps=3), tmp_path)
    (before,) = report.load_run(tmp_path).rows[-1:]
    # As after a kill before the last step was saved: it is repeated.
    shutil.rmtree(tmp_path / "checkpoints" / "3")
    loop.train(with_config(run, run__steps=4), tmp_path)
    rows = report.load_run(tmp_path).rows
    assert [row["step"] for row in rows if "time/start_s" in row] == [0, 3]
    spent = report.seconds_spent(rows)
    # Every part was measured; none is the remainder of others.
    assert all(seconds >= -1e-3 for seconds in spent.values()), spent
    assert spent["lost"] >= before["time/step_s"]
    first = rows[0]["time/start_s"] + rows[0]["time/step_s"]
    passed = rows[-1]["time"] - rows[0]["time"] + first
    assert sum(spent.values()) == pytest.approx(passed)

  def test_every_update_is_one_program(self, run, whole):
    del whole
    learner = run.learner
    for model in (learner.policy, learner.critic):
      assert model.update.whole._cache_size() == 1
      assert model.score._cache_size() == 1

  def test_a_finished_run_has_nothing_to_do(self, run, whole, capsys):
    before = tiny_run.snapshot(whole)
    # Left by a kill after the last save: a step that was being deleted.
    (whole / "checkpoints" / "1.deleted").mkdir()
    for steps in (6, 4):
      loop.train(with_config(run, run__steps=steps), whole)
      assert capsys.readouterr().out == (
        "the run is at its last step 6; raise run.steps to continue\n"
      )
    assert tiny_run.snapshot(whole) == before


class TestResume:
  def test_is_exact(self, run, whole, tmp_path):
    half = with_config(run, run__steps=3, checkpoint__every=2)
    loop.train(half, tmp_path)
    assert len(tiny_run.comparable(tmp_path)) == 4
    settings = (tmp_path / "config.json").read_bytes()
    loop.train(with_config(run, checkpoint__every=2), tmp_path)
    assert_same_run(run, whole, tmp_path)
    assert (tmp_path / "config.json").read_bytes() == settings
    (line,) = (tmp_path / "config_changes.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 3, "changes": {"run.steps": [3, 6]}}

  def test_a_signal_saves_and_returns(self, run, whole, tmp_path):
    number = signal.SIGTERM
    before = signal.getsignal(number)
    ask = lambda _: os.kill(os.getpid(), number)
    rare = {"checkpoint__every": 100}
    stopped = loop.train(
      with_config(interrupting(run, PRETRAINED + 2, ask), **rare), tmp_path
    )
    assert stopped == number
    assert [row["step"] for row in tiny_run.comparable(tmp_path)] == [0, 1, 2]
    assert (tmp_path / "checkpoints" / "2").is_dir()
    assert signal.getsignal(number) is before
    assert loop.train(with_config(run, **rare), tmp_path) == 0
    assert_same_run(run, whole, tmp_path)

  def test_a_suspect_host_saves_and_returns(self, run, tmp_path, monkeypatch):
    # For several processes, see tests/host_watch_test.py.
    suspect = lambda logger: {"host/suspect": 3}
    monkeypatch.setattr(metrics.MetricsLogger, "more", suspect)
    stopping = with_config(run, run__on_suspect="stop")
    stopping = dataclasses.replace(stopping, pretraining=None)
    assert loop.train(stopping, tmp_path) == signals.SUSPECT
    assert workdir_lib.steps(tmp_path) == [0, 1]

  def test_a_signal_before_the_first_step(
    self, run, tmp_path, monkeypatch, capsys
  ):
    evaluate = type(run.evaluators[0]).__call__

    def interrupted(*args):
      os.kill(os.getpid(), signal.SIGTERM)
      return evaluate(*args)

    monkeypatch.setattr(type(run.evaluators[0]), "__call__", interrupted)
    plain = dataclasses.replace(run, pretraining=None)
    assert loop.train(plain, tmp_path) == signal.SIGTERM
    shown = capsys.readouterr().out
    assert "stopped by SIGTERM at step 0, saved; rerun" in shown
    assert "pretraining" not in shown and workdir_lib.steps(tmp_path) == [0]

  @pytest.mark.slow
  @pytest.mark.parametrize("what", ["", "other settings", "damage"])
  def test_a_signal_during_value_pretraining(
    self, run, whole, tmp_path, capsys, what
  ):
    ask = lambda _: os.kill(os.getpid(), signal.SIGTERM)
    stopped = loop.train(interrupting(run, 2, ask), tmp_path)
    assert stopped == signal.SIGTERM
    assert "stopped in value pretraining" in capsys.readouterr().out
    assert tiny_run.comparable(tmp_path) == []
    if what == "other settings":  # Pretrained in another run.
      config = tmp_path / "config.json"
      config.write_text(config.read_text().replace('"seed": 0', '"seed": 1'))
    if what == "damage":
      for step in (tmp_path / CHECKPOINTS).iterdir():
        halve(step / "pretraining.best")
    capsys.readouterr()
    loop.train(run, tmp_path)
    shown = capsys.readouterr().out
    assert ("value pretraining continues after batch 2" in shown) == (not what)
    assert ("2: this checkpoint is damaged" in shown) == (what == "damage")
    assert_same_run(run, whole, tmp_path)
    assert pretraining_rows(tmp_path) == pretraining_rows(whole)
    assert not (tmp_path / CHECKPOINTS).exists()

  def test_another_seed_is_refused(self, run, whole):
    other = with_config(run, run__seed=1, run__steps=9)
    check_refused(other, whole, "config.run.seed: 0 -> 1; use the old")

  def test_the_folder_of_another_process_is_refused(self, run, whole):
    with Workdir(whole).held():
      longer = with_config(run, run__steps=9)
      check_refused(longer, whole, "another process trains in it")

  def test_a_tracker_that_is_not_installed(self, run, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'jaxrl_llm\[wandb\]'"):
      loop.train(with_config(run, run__trackers=("wandb",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def check_refused(run, workdir, said, **settings):
  """Checks that a run does not start in a folder, and changes nothing there."""
  before = tiny_run.snapshot(workdir)
  with pytest.raises(InputError, match=said):
    loop.train(run, workdir, **settings)
  assert tiny_run.snapshot(workdir) == before


def test_a_reward_that_fails_from_some_step_on_stops_it(
  run, tmp_path, monkeypatch
):
  more = {"run__max_skipped": 3, "checkpoint__every": 9, "eval__every": 9}
  train = lambda steps: loop.train(
    dataclasses.replace(
      with_config(run, run__steps=steps, **more), pretraining=None
    ),
    tmp_path,
  )
  judge, batches = run.judge.pool.judge, itertools.count()

  def failing(calls):  # After the first evaluation and step 1.
    down = Verdict(False, None, "error: down")
    return judge(calls) if next(batches) < 2 else [down for _ in calls]

  monkeypatch.setattr(run.judge.pool, "judge", failing)
  train(3)  # Two batches: the run continues, and so does the count on resume.
  said = "3 batches in a row, up to step 4, which was saved: reward .*"
  with pytest.raises(TrainingStopped, match=f"{said}down on chain_sum"):
    train(9)
  assert workdir_lib.steps(tmp_path) == [3, 4]


class TestDamage:
  def test_of_the_newest_goes_on_from_the_one_before(
    self, run, whole, tmp_path, capsys
  ):
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "copy"))
    # A row that a resume would remove, and truncated files.
    with (folder / "metrics.jsonl").open("a") as file:
      file.write('{"step": 7}\n')
    halve(folder / "checkpoints" / "6" / "learner.policy.trained")
    # The only checkpoint: rejected, and nothing is changed.
    alone = pathlib.Path(shutil.copytree(folder, tmp_path / "alone"))
    shutil.rmtree(alone / "checkpoints" / "5")
    more = with_config(run, run__steps=9)
    for directory, step in ((alone, None), (folder, 6)):
      said = "6: this checkpoint is damaged"
      check_refused(more, directory, said, step=step)
    loop.train(more, folder)
    shown = capsys.readouterr().out
    assert "checkpoint 6 is damaged (" in shown
    assert "resumed from step 5" in shown
    aside = folder / "set_aside_1" / "checkpoints" / "6"
    assert (aside / "learner.policy.trained").is_dir()
    rows = tiny_run.comparable(folder)
    assert rows[:6] == tiny_run.comparable(whole)[:6] and len(rows) == 10

  def test_of_rows_is_told(self, run, whole, tmp_path, capsys):
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "copy"))
    file = folder / "metrics.jsonl"
    rows = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(rows[:3] + rows[4:]))
    loop.train(with_config(run, run__steps=7), folder)
    shown = capsys.readouterr().out
    assert "metrics.jsonl: rows before checkpoint 6 are missing" in shown


def halve(item):
  for file in item.rglob("*"):
    if file.is_file():
      os.truncate(file, file.stat().st_size // 2)


class TestDiskFull:
  def test_training_goes_on_and_the_end_says_so(
    self, run, whole, tmp_path, monkeypatch, capsys
  ):
    write, failing = commit.write, {2, 3}

    def full(folder, *args, **record):
      if folder in [tmp_path / "checkpoints" / str(n) for n in failing]:
        raise OSError(28, "No space left on device")
      write(folder, *args, **record)

    monkeypatch.setattr(commit, "write", full)
    loop.train(run, tmp_path)
    shown = capsys.readouterr().out
    assert shown.count("cannot write a checkpoint (OSError: [Errno 28]") == 2
    rows = metrics.read_rows(tmp_path / "metrics.jsonl")
    assert rows[-1]["checkpoint/failures"] == 2
    assert_same_run(run, whole, tmp_path)
    # The last step is saved in two attempts; older checkpoints stay.
    failing |= {7}
    with pytest.raises(TrainingStopped, match="7: cannot write a checkpoint"):
      loop.train(with_config(run, run__steps=7), tmp_path)
    assert workdir_lib.steps(tmp_path) == [5, 6]


class TestBest:
  def train(self, run, workdir, best, **changes):
    changes = {"checkpoint__every": 100, "eval__every": 1} | changes
    changes |= {"checkpoint__best": best, "run__samples_every": 0}
    loop.train(with_config(run, **changes), workdir)

  def test_is_kept_beside_the_newest(self, run, tmp_path, monkeypatch):
    metric, evaluate = "eval/chain_sum/avg@2", loop.evaluate
    values = [0.1, 0.3, 0.2, 0.5, 0.5, 0.1, 0.2]

    def chosen(run, states, *arguments):
      row = evaluate(run, states, *arguments)
      return row | {metric: values[states.step]}

    monkeypatch.setattr(loop, "evaluate", chosen)
    self.train(run, tmp_path, metric, checkpoint__keep=2)
    assert workdir_lib.steps(tmp_path) == [3, 6]
    assert workdir_lib.find_step(tmp_path, "best") == 3

  def test_an_evaluation_without_it_ends_no_run(
    self, run, tmp_path, monkeypatch
  ):
    calls, results = [], Evaluation.results

    def failing(evaluated, tries):  # As if nothing had a verdict.
      calls.append(results(evaluated, tries))
      if len(calls) == missing:
        del calls[-1]["reward_mean"]
      return calls[-1]

    monkeypatch.setattr(Evaluation, "results", failing)
    missing, best = 3, "eval/chain_sum/reward_mean"
    self.train(run, tmp_path / "late", best, run__steps=3)
    assert len(calls) == 4
    missing = 5
    with pytest.raises(InputError, match="checkpoint.best=.* must be one of"):
      self.train(run, tmp_path / "first", best)

  @pytest.mark.parametrize("name", ["eval/chain_sum/greedy", "policy/loss"])
  def test_a_name_that_is_no_metric(self, run, name):
    with pytest.raises(InputError, match="one of eval/chain_sum/avg@2"):
      with_config(run, checkpoint__best=name)  # Also in a dry run.
    best = {"checkpoint__best": "eval/chain_sum/pass@1", "eval__pass_k": (1,)}
    with_config(run, **best)


class TestNotFinite:
  def test_stops_and_is_never_saved(self, run, tmp_path):
    bad = with_config(estimating(run, poison), run__max_skipped=3)
    with pytest.raises(TrainingStopped, match="last 4 updates of the pol"):
      loop.train(bad, tmp_path)
    # Step 1 skipped its two updates, step 2 exceeded the limit.
    rows = tiny_run.comparable(tmp_path)
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[1]["policy/skipped"] == 2 and rows[1]["value/skipped"] == 0
    states, _ = newest(run, tmp_path)
    policy = states.learner.policy
    assert states.step == 1 and policy.optimizer.skipped_in_a_row == 2
    _, before = models.load(run.config.model.path)
    chex.assert_trees_all_equal(jax.device_get(policy.trained), before)


class TestReplay:
  def test_an_update_done_twice_leaves_no_trace(self, run, whole, tmp_path):
    loop.train(with_config(run, run__replay_every=2), tmp_path)
    assert_same_run(run, whole, tmp_path)
    rows = metrics.read_rows(tmp_path / "metrics.jsonl")
    assert [bool(row.get("time/replay_s")) for row in rows] == (
      [False] + [False, True] * 3
    )

  def test_one_that_comes_out_otherwise_stops_the_run(self, run, tmp_path):
    def nudge(experience):
      experience["advantages"] = experience["advantages"] * 1.0001

    wrong = interrupting(run, PRETRAINED + 3, nudge)
    with pytest.raises(
      TrainingStopped, match="^step 2, computed twice, differs"
    ):
      loop.train(with_config(wrong, run__replay_every=2), tmp_path)
    # Only the policy learns from advantages.
    assert newest(run, tmp_path)[0].step == 1
    loop.train(with_config(run, run__steps=2), tmp_path)
    assert newest(run, tmp_path)[0].step == 2


class TestValuePretraining:
  def train(self, run, workdir, **changes):
    loop.train(with_config(run, run__steps=1, **changes), workdir)
    return metrics.read_rows(workdir / "value_pretrain.jsonl")

  def pretrain(self, run, states, weights, folder, logger, stopped):
    weights = Weights(weights.params, weights.version)
    return run.pretraining.run(states.learner, weights, folder, logger, stopped)

  def test_patience(self, run, tmp_path):
    # The first batch always counts as better; no later one improves by 10.
    changes = {
      "value__pretrain_steps": 20,
      "value__pretrain_min_delta": 10.0,
      "value__pretrain_patience": 3,
    }
    rows = self.train(run, tmp_path, **changes)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]

  def test_at_most_the_steps_of_the_config(self, run, tmp_path):
    rows = self.train(run, tmp_path, value__pretrain_min_delta=-10.0)
    # The last batch is only measured.
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert ["value/loss" in row for row in rows] == [True, True, False]
    # A new head predicts 0 everywhere, which explains nothing.
    assert rows[0]["value/explained_variance"] == 0.0

  def test_a_reward_model_comes_first_and_resumes(self, run, tmp_path):
    changes = {
      "value__reward_model_steps": 2,
      "value__pretrain_steps": 1,
      "value__pretrain_min_delta": -10.0,
    }
    rows = self.train(run, tmp_path / "whole", **changes)
    reward_model = ["value/outcome_explained_variance" in row for row in rows]
    whole_texts = ["value/explained_variance" in row for row in rows]
    assert reward_model == [True, True, False, False]
    assert whole_texts == [False, False, True, True]
    assert ["value/loss" in row for row in rows] == [True, True, True, False]
    # Training on last tokens also improves the values of prefixes.
    assert rows[2]["value/loss"] < rows[1]["value/loss"] < rows[0]["value/loss"]

    parts, folder = (
      with_config(run, run__steps=1, **changes),
      tmp_path / "parts",
    )
    states, weights = loop.begin(parts)
    for batches in (1, 2, 9):
      logger = metrics.MetricsLogger(folder, total_steps=1, last_step=-1)
      answers = itertools.chain([False] * batches, itertools.repeat(True))
      stopped = types.SimpleNamespace(agreed=answers.__next__)
      self.pretrain(parts, states, weights, folder, logger, stopped)
    assert pretraining_rows(folder) == pretraining_rows(tmp_path / "whole")
    once, again = (
      commit.read(x / FOLDER)["leaves"] for x in (folder, tmp_path / "whole")
    )
    assert once == again

  @pytest.mark.parametrize("best", [0, PRETRAINED - 1])
  def test_the_best_critic_is_kept_and_only_it_changes(
    self, run, tmp_path, monkeypatch, best
  ):
    measured = [float(i == best) for i in range(PRETRAINED)]
    monkeypatch.setattr(
      learner_metrics, "explained_variance", lambda experience: measured.pop(0)
    )
    critics, measure = [], Learner.measure

    def noted(self, state, *arguments):
      critics.append(jax.device_get(state.critic.trained))
      return measure(self, state, *arguments)

    monkeypatch.setattr(Learner, "measure", noted)
    states, weights = loop.begin(run)
    policy = jax.device_get(states.learner.policy)
    logger, stopped = metrics.PhaseLogger(), signals.Stopped()
    after = self.pretrain(run, states, weights, tmp_path, logger, stopped)
    assert not measured and len(critics) == PRETRAINED
    chex.assert_trees_all_equal(jax.device_get(after.policy), policy)
    assert (after.step, after.waiting) == (0, None)
    assert after.critic.optimizer.step == 0  # Reset.
    trained = jax.device_get(after.critic.trained)
    for i, critic in enumerate(critics):
      same = jax.tree.map(np.array_equal, trained, critic)
      assert all(jax.tree.leaves(same)) == (i == best)
    reused = with_config(run, value__init_from=str(tmp_path)).critic_params
    saved = reused(after.params("policy"))
    chex.assert_trees_all_equal(jax.device_get(saved), trained)

  def test_reused_from_nowhere(self, run, tmp_path):
    with pytest.raises(InputError, match="value_pretrained: no such check"):
      self.train(run, tmp_path, value__init_from=str(tmp_path / "no"))
