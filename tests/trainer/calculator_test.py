"""Trains the shipped base with a calculator by scripts/train.py."""

import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from helpers import programs, tiny_run, tiny_tppo

from jaxrl_llm import metrics, workdir
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.trainer import build
from jaxrl_llm.types import Origin

_ROOT = pathlib.Path(__file__).parents[2]
STEPS = 3
# Groups stay unfinished, so that checkpoints contain conversations.
_FLAGS = [
  "--config=configs/grpo.py",
  "--config.environment.name=calculator",
  "--config.environment.workers=2",
  '--config.sampler.stop=("=",)',
  "--config.schedule.stop=first_groups",
  "--config.schedule.over_provision=2",
  "--config.schedule.max_staleness=2",
  "--config.data.prompts_per_step=8",
  "--config.data.group_size=8",
  "--config.sampler.slots=16",
  "--config.optimizer.policy.mini_batch=64",
  "--config.model.remat_policy=none",  # Compiles faster.
  "--config.eval.problems=8",
  "--config.eval.samples=2",
  "--config.checkpoint.every=1",
  "--config.run.trackers=()",
  f"--config.run.steps={STEPS}",
]


def start(folder):
  return subprocess.Popen(
    [sys.executable, "scripts/train.py", *_FLAGS, f"--workdir={folder}"],
    cwd=_ROOT,
    env=programs.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def finish(process):
  output, _ = process.communicate(timeout=900)
  assert process.returncode == 0, output
  return output


def lives(process):
  """Returns whether a process is running; zombies do not count."""
  try:
    return process.status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Folder of an uninterrupted run."""
  folder = tmp_path_factory.mktemp("calculator") / "whole"
  finish(start(folder))
  return folder


@pytest.mark.slow
class TestCalculator:
  def test_is_asked_though_the_base_has_never_seen_it(self, whole):
    rows = metrics.read_rows(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row in rows[1:]:
      assert row["rollout/turns_mean"] > 2
      assert row["rollout/observation_tokens_mean"] > 2
      assert row["policy/skipped"] == row["reward/errors"] == 0

  def test_what_it_says_is_masked_and_read(self, whole):
    run = build.make_run(workdir.read_config(whole))
    states, _ = tiny_tppo.newest(run, whole)
    run.worker.close()
    store = states.rollout.store
    present = np.arange(store.mask.shape[1]) < store.lengths[:, None]
    heard = present & (store.origin == Origin.FOREIGN)
    np.testing.assert_array_equal(store.mask, present & ~heard)
    assert not store.behavior_logprobs[heard].any()
    # After a result, it continues as if it had written it: sum or answer.
    decode = Tokenizer(workdir.model_path(whole)).decode
    texts = [
      "".join(
        f"[{decode([token])}]" if origin == Origin.FOREIGN else decode([token])
        for token, origin in zip(tokens[:length], origins)
      )
      for tokens, origins, length in zip(
        store.tokens, store.origin, store.lengths
      )
    ]
    after = [part for text in texts for part in text.split("[;]")[1:]]
    usual = [re.fullmatch(r"\d+[-+]\d=(\[.*)?|#\d+\.", x) for x in after]
    assert len(after) > 10 and sum(map(bool, usual)) > 0.7 * len(after), after

  def test_killed_it_leaves_no_process_and_goes_on(self, whole, tmp_path):
    process = start(tmp_path)
    rows = tmp_path / "metrics.jsonl"
    started = lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 2
    programs.wait_until(lambda: process.poll() is None and started(), "a step")
    workers = psutil.Process(process.pid).children()
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    programs.wait_until(
      lambda: not any(map(lives, workers)), "the workers' end"
    )
    assert "resumed from step" in finish(start(tmp_path))
    assert tiny_run.comparable(tmp_path) == tiny_run.comparable(whole)
