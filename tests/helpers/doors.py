"""Trains a plugin for two steps, then resumes from its first checkpoint."""

import pathlib

from helpers import tiny_run

from jaxrl_llm.trainer import build


def make_config(model: pathlib.Path, **changes):
  """Makes a config with four groups of four and without a critic."""
  settings = {
    "estimator__name": "group",
    "loss__nll_coefficient": 0.0,
    "value__pretrain_steps": 0,
    "data__prompts_per_step": 4,
    "optimizer__policy__mini_batch": 8,
    "eval__problems": 2,
    "run__steps": 2,
  }
  return tiny_run.make_config(model, **settings | changes)


def train(model: pathlib.Path, folder: pathlib.Path, **changes) -> list[dict]:
  """Trains for two steps; returns the rows of metrics.

  Resuming from the first step must repeat the second one exactly.
  """
  run = build.make_run(make_config(model, **changes))
  rows = tiny_run.train_and_resume(run, folder)
  assert [row["step"] for row in rows] == [0, 1, 2]
  assert all(row["policy/skipped"] == 0 for row in rows[1:])
  return rows
