"""5,000 steps of the training loop while its file system fails."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_PATH = os.pathsep.join(str(_ROOT / x) for x in (".", "tests", "scripts/dev"))


def simulate(steps):
  done = subprocess.run(
    [sys.executable, _ROOT / "tests/trainer/simulation.py", f"--steps={steps}"],
    env=os.environ | {"PYTHONPATH": _PATH},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr[-2000:]
  return json.loads(done.stdout)


@pytest.mark.slow
def test_faults_leave_no_trace():
  found = simulate(5000)
  for kind in ("kill", "power", "full", "broken", "stop", "flip"):
    assert found[kind] >= 10


@pytest.mark.slow
def test_a_seed_repeats_itself():
  assert simulate(200) == simulate(200)
