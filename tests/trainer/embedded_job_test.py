"""The built-in job: RL alone changes the greedy behaviour of its base."""

import itertools
import json

import pytest
from helpers import programs


@pytest.mark.slow(minutes=3)
def test_greedy_accuracy_rises_and_the_critic_knows(tmp_path):
  programs.finish(
    "scripts/train.py",
    "--config=configs/vapo.py",
    "--config.run.seed=3",  # Not used to choose settings.
    "--config.run.steps=24",  # Of 40: the greedy mode has changed by then.
    "--config.eval.every=24",
    "--config.run.trackers=()",
    f"--workdir={tmp_path}",
    env=programs.environment_of_users(),
  )
  read = lambda name: list(
    map(json.loads, (tmp_path / name).read_text().splitlines())
  )
  before, first, *_, after = read("metrics.jsonl")
  assert before["eval/chain_sum/greedy"] <= 0.2
  assert before["eval/chain_sum/pass@4"] >= 0.5  # Sampling finds it.
  # Sampler and trainer agree on 13,000 tokens of the shipped base. Logits reach
  # 20, so that float32 itself differs from float64 by 1e-5 at improbable ones.
  assert first["sampler_trainer/logprob_diff_max"] <= 1e-5
  assert first["sampler_trainer/logprob_diff_mean"] <= 1e-6
  assert after["eval/chain_sum/greedy"] >= 0.9
  assert after["eval/chain_sum/avg@4"] >= 0.8
  # Explained variance of responses before the critic trains on them: after
  # value pretraining, and while the policy still has much to learn.
  assert read("value_pretrain.jsonl")[-1]["value/explained_variance"] >= 0.5
  learning = itertools.takewhile(
    lambda row: row["reward/accuracy"] <= 0.8, read("metrics.jsonl")[1:]
  )
  explained = [row["value/explained_variance"] for row in learning]
  assert len(explained) >= 4 and min(explained) >= 0.3
  assert sum(explained) / len(explained) >= 0.5
