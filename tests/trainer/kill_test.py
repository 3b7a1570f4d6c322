"""A run that is killed repeatedly ends exactly like an uninterrupted one."""

import contextlib
import pathlib
import random
import shutil
import signal
import sys
import tempfile

import pytest
from helpers import programs, tiny_run

_IMPORTS = """
import importlib, signal
from helpers import tiny_run
from jaxrl_llm.trainer import build, loop
"""
# A run that kills itself before or after the given call of a function.
_RUN = """
os.dup2(2, 1)
model, workdir, place, when, number = given
calls = 0

def killed(function):
  def wrapped(*args, **kwargs):
    global calls
    # Count removed or renamed files only if they belong to a checkpoint.
    named = place.split(":")[0] in ("os", "shutil")
    mine = not named or str(args[0]).endswith(("COMMIT.part", ".deleted"))
    calls += mine
    due = mine and calls == number
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
loop.train(build.make_run(tiny_run.make_config(
  model, **tiny_run.EVALUATES_LIKE_A_STEP
)), workdir)
"""
_ORBAX = "orbax.checkpoint:AsyncCheckpointer.save"
_PLACES = [
  ("jaxrl_llm.learner.learner:Learner.update_member", "before", 2),
  (_ORBAX, "after", 1),
  ("os:replace", "before", 2),  # COMMIT of step 0, after the critic's.
  # Nothing is written from here to the next row: update and sync are the same.
  ("jaxrl_llm.rollout.worker:RolloutWorker.collect", "after", 2),
  ("shutil:rmtree", "before", 1),  # An old step being deleted.
  ("jaxrl_llm.checkpoint.commit:check_bits", "before", 1),  # During restore.
  ("jaxrl_llm.metrics:MetricsLogger.log", "after", 1),
  (_ORBAX, "before", 1),
]


@contextlib.contextmanager
def trainer(log):
  """Yields a function that trains in a process and returns its exit code.

  Its arguments are the model, the run's folder, and where the run kills itself:
  a function, before or after its call, and the number of the call.
  """
  env = programs.environment_of_tests()
  with programs.forks(_IMPORTS, _RUN, env, log) as start:

    def train(model, workdir, place="nowhere", when="before", number=0):
      return start(str(model), str(workdir), place, when, number)

    yield train


def kill_in_turn(folder, places):
  """Kills a run at each place in turn, then checks that it can finish.

  Returns:
    The number of kills, and the content of the checkpoint folder at the end.
  """
  model, log = tiny_run.write_model(folder / "model"), folder / "log"
  whole, broken, kills = folder / "whole", folder / "broken", 0
  with trainer(log) as train:
    assert train(model, whole) == 0, log.read_text()
    for place in places:
      code = train(model, broken, *place)
      assert code in (0, -signal.SIGKILL), (place, log.read_text())
      kills += code != 0
      if (broken / "checkpoints" / "6" / "COMMIT").exists():
        # (Almost) finished: remove steps, so that something can be killed.
        for step in ("4", "5", "6"):
          shutil.rmtree(broken / "checkpoints" / step, ignore_errors=True)
    assert train(model, broken) == 0, log.read_text()
  tiny_run.assert_same_end(6, broken, whole)
  return kills, {path.name for path in (broken / "checkpoints").iterdir()}


@pytest.mark.slow(minutes=0.7)
def test_killed_at_every_place_in_turn(tmp_path):
  kills, left = kill_in_turn(tmp_path, _PLACES)
  assert kills == len(_PLACES) and left == {"5", "6"}


if __name__ == "__main__":  # kill_test.py KILLS SEED
  rng = random.Random(int(sys.argv[2]))
  drawn = [
    (place, rng.choice(["before", "after"]), rng.randint(1, 3))
    for place, _, _ in (rng.choice(_PLACES) for _ in range(int(sys.argv[1])))
  ]
  with tempfile.TemporaryDirectory() as scratch:
    print(*kill_in_turn(pathlib.Path(scratch), drawn))
