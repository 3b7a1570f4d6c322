"""Runs 5,000 steps of the training loop on a failing file system."""

import json
import os
import pathlib

import pytest
from helpers import programs

_ROOT = pathlib.Path(__file__).parents[2]
_PATH = os.pathsep.join(str(_ROOT / x) for x in (".", "tests", "scripts/dev"))


def simulate(steps):
  shown, _ = programs.finish(
    "tests/trainer/simulation.py",
    f"--steps={steps}",
    env=os.environ | {"PYTHONPATH": _PATH},
  )
  return json.loads(shown)


@pytest.mark.slow
def test_faults_leave_no_trace():
  found = simulate(5000)
  for kind in ("kill", "power", "full", "broken", "stop", "flip"):
    assert found[kind] >= 10


@pytest.mark.slow
def test_a_seed_repeats_itself():
  assert simulate(200) == simulate(200)
