"""A tiny policy with experts learns the built-in task in scripts/train.py."""

import jax
import numpy as np
import pytest
from helpers import programs, upcycled

from jaxrl_llm import api, metrics


@pytest.mark.slow(minutes=1)
def test_a_policy_with_experts_learns_the_embedded_task(tmp_path):
  upcycled.write(tmp_path / "model")
  env = programs.environment_of_users()
  programs.finish(
    "scripts/train.py",
    "--config=configs/grpo.py",
    f"--plugin={upcycled.__file__}",
    f"--workdir={tmp_path / 'run'}",
    f"--config.model.path={tmp_path / 'model'}",
    "--config.mesh.data=1",
    "--config.run.steps=6",
    "--config.run.trackers=()",
    "--config.eval.problems=8",
    "--config.eval.samples=8",  # As in a step, with the same programs.
    "--config.eval.greedy=False",
    "--config.eval.every=6",
    env=env,
  )
  rows = metrics.read_rows(tmp_path / "run" / "metrics.jsonl")[1:]
  of = lambda name: np.asarray([row[name] for row in rows])
  accuracy = of("reward/accuracy")
  assert accuracy[-2:].mean() > accuracy[:2].mean() + 0.05
  # Each token uses two of four experts: 2.0 is the maximum, 1.0 is balanced.
  assert of("policy/expert_load").max() < 1.8
  assert of("sampler_trainer/logprob_diff_max").max() < 1e-3
  programs.finish(
    "scripts/convert.py",
    f"--plugin={upcycled.__file__}",
    f"--checkpoint={tmp_path / 'run'}",
    f"--out={tmp_path / 'out'}",
    env=env,
  )
  written, trained = (
    api.load(tmp_path / name).params for name in ("out", "run")
  )
  jax.tree.map(np.testing.assert_array_equal, written, trained)
