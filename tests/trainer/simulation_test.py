"""Runs 2,500 steps of the training loop on a failing file system."""

import json

import pytest
from helpers import programs


@pytest.mark.slow
def test_faults_leave_no_trace():
  shown, _ = programs.finish(
    "tests/trainer/simulation.py",
    "--steps=2500",
    env=programs.environment_of_tests(),
  )
  found = json.loads(shown)
  for kind in ("kill", "power", "full", "broken", "stop", "flip"):
    assert found[kind] >= 10
