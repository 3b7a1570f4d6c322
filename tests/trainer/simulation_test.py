"""Runs 2,500 steps of the training loop on a failing file system."""

import json
import os
import pathlib

import pytest
from helpers import programs

_ROOT = pathlib.Path(__file__).parents[2]
_PATH = os.pathsep.join(str(_ROOT / x) for x in (".", "tests", "scripts/dev"))


@pytest.mark.slow
def test_faults_leave_no_trace():
  shown, _ = programs.finish(
    "tests/trainer/simulation.py",
    "--steps=2500",
    env=os.environ | {"PYTHONPATH": _PATH},
  )
  found = json.loads(shown)
  for kind in ("kill", "power", "full", "broken", "stop", "flip"):
    assert found[kind] >= 10
