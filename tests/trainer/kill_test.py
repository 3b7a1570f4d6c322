"""A run that is killed at one place after another ends as if it never was."""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from helpers import tiny_run

from jaxrl_llm.checkpoint import commit

_ROOT = pathlib.Path(__file__).parents[2]
_PATH = os.pathsep.join(str(_ROOT / x) for x in (".", "tests", "scripts/dev"))
# Kills itself before or after the call of a function whose number is given.
_PROGRAM = """
import importlib, os, signal, sys
from helpers import tiny_run
from jaxrl_llm.trainer import build, loop

model, workdir, place, when, number = sys.argv[1:]
calls = 0

def killed(function):
  def wrapped(*args, **kwargs):
    global calls
    # Of a file that is removed or renamed, only what is of a checkpoint.
    named = place.split(":")[0] in ("os", "shutil")
    mine = not named or str(args[0]).endswith(("COMMIT.part", ".deleted"))
    calls += mine
    due = mine and calls == int(number)
    if due and when == "before":
      os.kill(os.getpid(), signal.SIGKILL)
    out = function(*args, **kwargs)
    if due:
      os.kill(os.getpid(), signal.SIGKILL)
    return out
  return wrapped

if place != "nowhere":
  module, _, path = place.partition(":")
  *owners, name = path.split(".")
  owner = importlib.import_module(module)
  for part in owners:
    owner = getattr(owner, part)
  setattr(owner, name, killed(getattr(owner, name)))
loop.train(build.make_run(tiny_run.make_config(model)), workdir)
"""
_ORBAX = "orbax.checkpoint:AsyncCheckpointer.save"
_PLACES = [
  ("jaxrl_llm.learner.learner:Learner.update_member", "before", 2),
  ("jaxrl_llm.checkpoint.commit:write", "before", 1),  # Of the critic.
  (_ORBAX, "after", 1),
  ("os:replace", "before", 2),  # COMMIT of step 0, after the critic's.
  # From here to the next row nothing is written: update and sync are the same.
  ("jaxrl_llm.rollout.worker:RolloutWorker.collect", "after", 2),
  ("os:replace", "after", 1),  # A COMMIT, before the older ones go.
  ("shutil:rmtree", "before", 1),  # A step that has made room.
  ("jaxrl_llm.checkpoint.commit:check_bits", "before", 1),  # In a restore.
  ("jaxrl_llm.metrics:MetricsLogger.log", "after", 1),
  (_ORBAX, "before", 1),
]


def train(model, workdir, place="nowhere", when="before", number=0):
  """Trains; kills itself at a place."""
  command = [model, workdir, place, when, number]
  return subprocess.run(
    [sys.executable, "-c", _PROGRAM, *map(str, command)],
    env=os.environ | {"PYTHONPATH": _PATH},
    capture_output=True,
    text=True,
    timeout=600,
  )


def train_whole(folder):
  """A model, and the folder of an uninterrupted run."""
  model = tiny_run.write_model(folder / "model")
  done = train(model, folder / "whole")
  assert done.returncode == 0, done.stderr[-2000:]
  return model, folder / "whole"


def kill(model, whole, broken, places):
  """How often a run was killed in turn; then it must go through."""
  kills = 0
  for place in places:
    done = train(model, broken, *place)
    assert done.returncode in (0, -signal.SIGKILL), (place, done.stderr[-2000:])
    kills += done.returncode != 0
    if (broken / "checkpoints" / "6" / "COMMIT").exists():
      # Through, or nearly: so that there is something to kill.
      for step in ("4", "5", "6"):
        shutil.rmtree(broken / "checkpoints" / step, ignore_errors=True)
  done = train(model, broken)
  assert done.returncode == 0, done.stderr[-2000:]
  assert tiny_run.comparable(broken) == tiny_run.comparable(whole)
  ends = [commit.read(x / "checkpoints" / "6") for x in (broken, whole)]
  assert ends[0]["leaves"] == ends[1]["leaves"]
  assert ends[0]["states"] == ends[1]["states"]
  return kills, {path.name for path in (broken / "checkpoints").iterdir()}


@pytest.mark.slow(minutes=1)
def test_killed_at_every_place_in_turn(tmp_path):
  model, whole = train_whole(tmp_path)
  kills, left = kill(model, whole, tmp_path / "broken", _PLACES)
  assert kills == len(_PLACES) and left == {"5", "6"}


if __name__ == "__main__":  # kill_test.py KILLS SEED
  rng = random.Random(int(sys.argv[2]))
  drawn = [
    (place, rng.choice(["before", "after"]), rng.randint(1, 3))
    for place, _, _ in (rng.choice(_PLACES) for _ in range(int(sys.argv[1])))
  ]
  with tempfile.TemporaryDirectory() as scratch:
    scratch = pathlib.Path(scratch)
    model, whole = train_whole(scratch)
    kills, left = kill(model, whole, scratch / "broken", drawn)
    print(kills, left)
