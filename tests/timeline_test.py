"""The timeline runs every schedule and places its phases correctly."""

import csv
import pathlib

import pytest
import study
from helpers import programs
from studies import timeline

from jaxrl_llm import config as config_lib

ROOT = pathlib.Path(__file__).parents[1]


def test_one_device_and_steps_out_of_range_are_refused(tmp_path, monkeypatch):
  flags = "timeline", f"--out={tmp_path}"
  said = programs.refused(study.main, *flags, "--warm_up=-1")
  assert "--warm_up=-1 must be at least 0" in said
  monkeypatch.setattr("jax.device_count", lambda: 1)
  assert "at least 2 devices" in programs.refused(study.main, *flags)
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_shows_who_works_at_the_same_time(tmp_path, monkeypatch):
  pytest.importorskip("matplotlib")
  make_config = timeline.make_config

  def make_small(name):
    config = make_config(name)
    config.data.prompts_per_step = 16
    config.optimizer.policy.mini_batch = config_lib.batch_size(config)
    return config

  monkeypatch.setattr(timeline, "make_config", make_small)
  flags = [f"--out={tmp_path}", "--steps=2", "--warm_up=0"]
  assert study.main(["timeline", *flags]) == 0
  assert (tmp_path / "timeline.png").stat().st_size > 10_000
  rows = list(csv.DictReader((tmp_path / "timeline.csv").open()))
  shared, phases = {}, ("generate", "update_policy")
  for name in {row["schedule"] for row in rows}:
    sides = {"sampler": [], "learner": []}
    for row in rows:
      if row["schedule"] == name and row["phase"] in phases:
        span = float(row["begin_s"]), float(row["end_s"])
        sides[row["side"]].append(span)
    shared[name] = sum(
      max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
      for a in sides["sampler"]
      for b in sides["learner"]
    )
  assert shared["sequential"] == 0.0
  assert shared["streaming"] > 0.0 and shared["lag 1"] > 0.0
