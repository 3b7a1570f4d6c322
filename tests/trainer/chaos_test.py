"""Breaks a small training run again and again; it must end as if nothing was.

    PYTHONPATH=.:tests:scripts:scripts/dev \
        python tests/trainer/chaos_test.py --faults=8 --seed=0

One run goes through. Another is killed, asked to stop, killed while it resumes,
has a file of its newest checkpoint damaged, or meets a full disk, in turn, at
moments drawn from the seed, and is started again each time. In the end its rows
and every array of its last checkpoint equal those of the first. Prints what was
done, what the run said and how many steps it did again.
"""

import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from helpers import tiny_run
from parts import program

from jaxrl_llm.checkpoint import commit

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_STEPS = 12
_KINDS = ("kill", "stop", "kill at start", "damage", "disk")
# The embedded job, made small; its steps are long enough to be hit.
_SETTINGS = {"run.steps": _STEPS, "checkpoint.every": 2, "checkpoint.keep": 8}
_SETTINGS |= {"value.pretrain_steps": 2, "data.prompts_per_step": 16}
_SETTINGS |= {"data.group_size": 4, "eval.problems": 8, "eval.every": 6}
_SETTINGS |= {"eval.greedy": False, "run.trackers": "()"}
_SETTINGS |= {f"optimizer.{x}.mini_batch": 16 for x in ("policy", "value")}


def start(workdir, *, send=0, after_s=None, blocks="unlimited"):
  """Runs it, perhaps to a signal or with files of at most so many blocks.

  Returns:
    The exit code, and what it said.
  """
  flags = ["--config=configs/vapo.py", f"--workdir={workdir}"]
  flags += [f"--config.{key}={value}" for key, value in _SETTINGS.items()]
  limit = ("sh", "-c", f'ulimit -f {blocks}; exec "$0" "$@"')
  with subprocess.Popen(
    [*limit, sys.executable, "scripts/train.py", *flags],
    cwd=_ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors="replace",
  ) as process:
    try:
      said, _ = process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
      process.send_signal(send)
      said, _ = process.communicate()
  return process.returncode, said


def committed(workdir):
  """The checkpoints, ascending."""
  return sorted(
    int(file.parent.name) for file in workdir.glob("checkpoints/*/COMMIT")
  )


def damage(rng, folder):
  """Flips a bit of a file of a checkpoint, cuts or deletes it; says which."""
  files = [f for f in folder.rglob("*") if f.is_file() and f.stat().st_size]
  file = rng.choice(sorted(files))
  data = bytearray(file.read_bytes())
  how = rng.choice(["flipped", "cut", "deleted"])
  data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  file.write_bytes(data if how == "flipped" else data[: len(data) // 2])
  if how == "deleted":
    file.unlink()
  return f"{how}: {file.relative_to(folder.parent)}"


def inflict(rng, kind, workdir, whole_s):
  """Does a fault of a kind; returns a row about it and the steps it took."""
  at = rng.uniform(0.4, 0.9) * whole_s
  if kind == "kill at start":
    at = rng.uniform(0.1, 0.4) * whole_s
  how = {"send": signal.SIGKILL, "after_s": at}
  if kind == "stop":
    how["send"] = signal.SIGTERM
  elif kind == "disk":
    at = rng.randint(2, 2000)  # Of 512 bytes.
    how = {"blocks": at}
  code, said = start(workdir, **how)
  told = [s for s in said.splitlines() if "damaged" in s or "cannot write" in s]
  good, said = committed(workdir), "; ".join(told)[:120]
  if kind == "damage" and len(good) > 1:
    said = damage(rng, workdir / "checkpoints" / str(good.pop()))
  rows = workdir / "metrics.jsonl"
  whole = rows.read_text().split("\n")[:-1] if rows.exists() else []
  reached = json.loads(whole[-1])["step"] if whole else -1
  lost = reached - good[-1] if good else reached + 1
  return (kind, f"{at:.1f}", code, reached, lost, said), reached, lost


def outcome(workdir):
  """Rows without what is measured, and the record of the last checkpoint."""
  record = commit.read(workdir / "checkpoints" / str(_STEPS))
  return tiny_run.comparable(workdir), record["leaves"], record["states"]


def campaign(folder, *, kinds, seed):
  """Breaks a run in turn, prints how, and compares it with a whole one."""
  for name in ("compiles", "whole"):
    begun = time.perf_counter()
    code, said = start(folder / name)
    assert code == 0, said[-2000:]
  whole_s, broken = time.perf_counter() - begun, folder / "broken"
  rng, again = random.Random(seed), 0
  table = program.Table("fault | at | exit | reached | done again | said")
  for kind in kinds:
    row, reached, lost = inflict(rng, kind, broken, whole_s)
    table.row(*row)
    again += lost
    if reached >= _STEPS:
      # Through: late checkpoints go, so that there is something to break.
      for step in map(str, range(6, _STEPS + 1)):
        shutil.rmtree(broken / "checkpoints" / step, ignore_errors=True)
  code, said = start(broken)
  assert code == 0, said[-2000:]
  assert outcome(broken) == outcome(folder / "whole")
  print(f"\n{len(kinds)} faults, {again} steps done again; nothing differs")


@pytest.mark.slow(minutes=1)
def test_faults_leave_no_trace(tmp_path, capsys, monkeypatch):
  """Kills are those of kill_test.py, signals those of processes_test.py."""
  monkeypatch.delenv("XLA_FLAGS")  # Of tests: they run slowly, on 8 devices.
  kinds = ("disk", "damage")
  campaign(tmp_path, kinds=kinds, seed=1)
  shown = capsys.readouterr().out
  assert all(f"| {kind} |" in shown for kind in kinds)


if __name__ == "__main__":
  parser = program.make_parser(__doc__)
  parser.add_argument("--faults", type=int, default=8)
  parser.add_argument("--seed", type=int, default=0)
  with tempfile.TemporaryDirectory() as place:
    options = parser.parse_args()
    kinds = [_KINDS[i % len(_KINDS)] for i in range(options.faults)]
    campaign(pathlib.Path(place), kinds=kinds, seed=options.seed)
