"""Tests of the lines that describe a run."""

import pathlib

import jax
import pytest
from helpers import tiny_run

from jaxrl_llm.trainer import build, summary

_NO_CRITIC = {"estimator__name": "group", "value__pretrain_steps": 0}


def _lines(model, **settings):
  run = build.make_run(tiny_run.make_config(model, **settings))
  lines = dict(line.split(maxsplit=1) for line in summary.describe(run))
  trained = jax.tree.leaves(run.learner.policy.shapes.trained)
  return run.config, sum(x.size for x in trained), lines


class TestDescribe:
  def test_a_run_with_a_critic(self, model):
    config, size, lines = _lines(model)
    assert f"llama, {size:,} parameters" in lines["model"]
    assert "a critic of the same size" in lines["model"]
    assert lines["model"].endswith(str(model))
    assert f"seed {config.run.seed}, " in lines["method"]
    assert "chain_sum, endless" in lines["data"]
    assert f"{config.eval.problems} problems of chain_sum" in lines["data"]
    assert "8 prompts x 4 responses of up to 12 tokens" in lines["batch"]
    updates = 32 // config.optimizer.value.mini_batch
    assert f"{updates} critic updates of" in lines["batch"]
    assert "shared with the trainer" in lines["sampler"]

  def test_counts_a_file_and_leaves_the_critic_out(self, model, tmp_path):
    rows = [f'{{"question": "{i}+1?", "answer": "{i + 1}"}}' for i in range(9)]
    file = tmp_path / "nine.jsonl"
    file.write_text("\n".join(rows))
    paths = dict.fromkeys(("data__path", "eval__path"), str(file))
    data = {"data__source": "jsonl", "data__settings": {}} | paths
    *_, lines = _lines(model, **data, **_NO_CRITIC)
    assert f"{file}, 9 examples" in lines["data"]
    assert "critic" not in lines["model"] + lines["batch"]

  def test_bytes_are_those_of_the_arrays(self, model):
    _, size, lines = _lines(model, **_NO_CRITIC)
    # Parameters and two moments in float32.
    gib = float(lines["trainer"].split("holds ")[1].split()[0])
    assert gib == pytest.approx(3 * 4 * size / 2**30, abs=5e-4)


def test_reached():
  accuracy = {0: 0.1, 20: 0.9, 40: 0.8}
  rows = [{"step": k, "eval/x/greedy": v} for k, v in accuracy.items()]
  rows[1]["eval/x/pass@4"] = 1.0
  rows.insert(1, {"step": 10})
  first, last = summary.reached(rows, pathlib.Path("runs/a"))
  assert first == "x greedy 0.100 → 0.800 (steps 0 and 40)"
  assert "report.py runs/a" in last and "--out=MODEL" in last
