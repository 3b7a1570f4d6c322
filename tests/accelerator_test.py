"""Tests of scripts/accelerator.py and of the programs that it runs."""

import argparse
import copy
import dataclasses
import json
import math

import accelerator
import pytest
from benchmarks import devices
from helpers import cases, programs

from jaxrl_llm import models
from jaxrl_llm.errors import InputError
from jaxrl_llm.tools.simulate.models import MODELS


def collect(parts):
  return {key: value for numbers in parts for key, value in numbers.items()}


def options(**given):
  given = {"sizes": "small", "seconds": 60.0, "model": "", "data": ""} | given
  return argparse.Namespace(**given)


def test_a_part_that_fails_or_is_late_costs_no_other(monkeypatch):
  def fails(options, limit_s):
    yield {"found_before": 1.0}
    raise InputError("no memory")

  limits, saved = [], []

  def works(options, limit_s):
    limits.append(limit_s)
    yield {"tokens_per_s": 2.0}
    yield {"bytes_per_s": 3.0}

  def save(found):
    saved.append(copy.deepcopy(found))

  parts = {"bad": (fails, 10.0), "good": (works, 10.0), "last": (works, 20.0)}
  monkeypatch.setattr(accelerator, "PARTS", parts)
  accelerator.measure_all(list(parts), options(), save)
  numbers = {"tokens_per_s": 2.0, "bytes_per_s": 3.0}
  assert saved[-1] == {
    "parts": {"bad": {"found_before": 1.0}, "good": numbers, "last": numbers},
    "errors": {"bad": "no memory"},
  }
  # All results so far are saved after every measurement.
  assert saved[0] == {"parts": {"bad": {"found_before": 1.0}}, "errors": {}}
  assert saved[2]["parts"]["good"] == {"tokens_per_s": 2.0}
  # A third of the remaining time, then all of it.
  assert limits == pytest.approx([20.0, 60.0], abs=0.5)


def test_a_part_that_is_cut_keeps_what_it_measured(monkeypatch, tmp_path):
  program = tmp_path / "program.py"
  program.write_text("""
import sys, time
print('{"first": 1.0}', flush=True)
print("a word of a library", flush=True)
if "--part=slow" in sys.argv:
  time.sleep(60)
print('{"second": 2.0}', flush=True)
sys.exit("what went wrong")
""")
  monkeypatch.setattr(accelerator, "__file__", str(program))
  for part, limit_s, numbers, problem in (
    ("slow", 1.0, ["first"], "took more than 1 s"),
    ("fast", 60.0, ["first", "second"], "exit code 1: what went wrong"),
  ):
    found = []
    with pytest.raises(InputError, match=problem):
      for more in accelerator.on_device(part, options(), limit_s):
        found.extend(more)
    assert found == numbers


def test_the_table_divides_by_the_peak_of_its_kind():
  record = cases.load("accelerator")["record"]
  rows = accelerator.table(record).splitlines()
  assert "| decode | `a_bytes_per_s` | 50 | 0.50 |" in rows
  assert "| decode | `a_tokens_per_s` | 3 |  |" in rows
  assert "| update | `b_flops_per_s` | 20 | 0.25 |" in rows
  assert "| tail | failed | too late |  |" in rows
  del record["parts"]["device"]["data_sheet_flops_per_s"]
  assert "| update | `b_flops_per_s` | 20 | 0.50 |" in accelerator.table(record)
  del record["parts"]["device"]
  assert "| update | `b_flops_per_s` | 20 |  |" in accelerator.table(record)


def test_windows_and_whole_responses_are_compared_after_the_warm_up(
  monkeypatch,
):
  def train(flags, limit_s):
    (method,) = (f for f in flags if f.startswith("--config="))
    windows = "tppo" in method
    rows = [{"step": 0}] + [
      {
        "step": step,
        "time/generate_s": (1.0 if windows else 4.0) if step > 2 else 99.0,
        "rollout/decode_steps": 10 if windows else 40,
        "rollout/tokens": 30 if windows else 60,
      }
      for step in range(1, 5)
    ]
    return rows

  monkeypatch.setattr(accelerator, "train", train)
  out = collect(accelerator.measure_tail(options(), 10.0))
  assert out["full_steps"] == out["windows_steps"] == 2
  assert (out["full_generate_s"], out["windows_generate_s"]) == (4.0, 1.0)
  assert out["windows_over_full_tokens_per_s"] == 2.0
  monkeypatch.setattr(accelerator, "train", lambda *_: [{"step": 0}])
  with pytest.raises(InputError, match="no step after the warm-up"):
    collect(accelerator.measure_tail(options(), 10.0))


def test_accuracy_is_that_of_the_first_and_of_the_last_evaluation(monkeypatch):
  rows = [
    {"step": 0, "eval/x/greedy": 0.1, "eval/x/avg@4": 0.3, "eval/x/pass@4": 1},
    {"step": 1, "reward/accuracy": 0.2},
    {"step": 20, "eval/x/greedy": 0.5, "eval/x/avg@4": 0.4},
    {"step": 40, "eval/x/greedy": 0.9, "eval/x/avg@4": 0.8},
    {"step": 41, "reward/accuracy": 0.7},
  ]
  given = []

  def train(flags, limit_s):
    given.extend(flags)
    return rows

  monkeypatch.setattr(accelerator, "train", train)
  own = options(model="/models/small", data="questions.jsonl")
  out = collect(accelerator.PARTS["gsm8k"][0](own, 10.0))
  assert out.pop("seconds") >= 0
  assert out == {
    "steps": 41,
    "greedy_at_0": 0.1,
    "avg@4_at_0": 0.3,
    "accuracy_at_1": 0.2,
    "greedy_at_40": 0.9,
    "avg@4_at_40": 0.8,
    "accuracy_at_41": 0.7,
  }
  assert "--config.model.path=/models/small" in given
  assert "--config.data.path=questions.jsonl" in given


def test_training_that_fails_or_has_no_time_says_so():
  with pytest.raises(InputError, match="no such key"):
    accelerator.train(["--config=configs/grpo.py", "--config.no.key=1"], 300.0)
  with pytest.raises(InputError, match="more than 0 s for a step"):
    accelerator.train(["--config=configs/grpo.py"], 0.1)


def test_as_many_layers_as_fit_and_at_least_one(monkeypatch):
  whole = MODELS["qwen2.5-7b"]
  memory = lambda gib: monkeypatch.setattr(
    devices, "_memory_bytes", lambda: gib * 2**30
  )
  memory(0)  # A device that does not report it.
  assert devices._that_fits(whole) == whole
  memory(2000)
  assert devices._that_fits(whole) == whole
  memory(60)
  few = devices._that_fits(whole)
  assert 1 < few.num_layers < 28
  more = dataclasses.replace(few, num_layers=few.num_layers + 1)
  of = lambda config: models.num_params(config) * devices._BYTES_PER_PARAM
  assert of(few) <= 60 * 2**30 < of(more)
  memory(1)
  assert devices._that_fits(whole).num_layers == 1


@pytest.mark.slow(minutes=1)
def test_measures_a_device_and_writes_what_it_saw(tmp_path):
  parts = "device,decode,update,attention,agreement"
  flags = [f"--parts={parts}", f"--out={tmp_path}"]
  programs.finish("scripts/accelerator.py", *flags)
  record = json.loads((tmp_path / "cpu.json").read_text())
  assert record["errors"] == {} and record["sizes"] == "small"
  found = record["parts"]
  assert list(found) == parts.split(",")
  assert found["agreement"]["float32_tokens"] == 4 * 64
  assert found["agreement"]["float32_difference_max"] < 1e-5
  assert found["agreement"]["bfloat16_difference_max"] < 0.1
  assert found["attention"]["packed_gradient_xla_s"] > 0
  for numbers in found.values():
    assert all(math.isfinite(value) for value in numbers.values())
  table = (tmp_path / "cpu.md").read_text()
  for slots in (1, 16, 64, 256):
    assert f"| decode | `slots_{slots}_tokens_per_s`" in table
  assert "| update | `tiny_flops_per_s`" in table
