"""Runs with lower matmul precision in both programs or in one."""

import json

from helpers import tiny_run

from jaxrl_llm.trainer import build, loop


def differences(model, folder, **changes):
  """Returns the mean log-prob difference in each step of a run."""
  settings = {"run__steps": 2} | changes
  loop.train(build.make_run(tiny_run.make_config(model, **settings)), folder)
  rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
  key = "sampler_trainer/logprob_diff_mean"
  return [row[key] for row in rows if key in row]


def test_a_format_meets_adapters_windows_and_an_exact_sampler(model, tmp_path):
  found = differences(
    model,
    tmp_path,
    model__matmul="fp8",
    model__lora_rank=4,
    value__lora_rank=4,
    sampler__exact=True,
  )
  assert found == [0, 0]


def test_a_sampler_of_its_own_format_is_corrected(model, tmp_path):
  found = differences(
    model,
    tmp_path,
    model__sampler_matmul="fp8",
    off_policy__correction="truncate",
    estimator__name="group",
    value__pretrain_steps=0,
  )
  assert len(found) == 2 and min(found) > 1e-4
