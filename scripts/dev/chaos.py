"""Breaks a small training run again and again; it must end as if nothing was.

    python scripts/dev/chaos.py --faults=8 --seed=0 [--out=runs/chaos]

One run goes through. Another is killed, asked to stop, killed while it resumes,
has a file of its newest checkpoint damaged, or meets a full disk, in turn, at
moments drawn from the seed, and is started again each time. In the end
its rows and every array of its last checkpoint must equal those of the first.
Prints a table of what was done, what the run said and how many steps it did
again. Exit code 0 if both are equal, 1 if not.
"""

import argparse
import json
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_STEPS = 12
_KINDS = ("kill", "stop", "kill at start", "damage", "disk")
_SETTINGS = {
  "run.steps": _STEPS,
  "checkpoint.every": 2,
  "checkpoint.keep": 8,
  "value.pretrain_steps": 2,
  "data.prompts_per_step": 16,
  "data.group_size": 4,
  "eval.problems": 8,
  "eval.every": 6,
  "eval.greedy": False,
  "optimizer.policy.mini_batch": 16,
  "optimizer.value.mini_batch": 16,
  "run.trackers": "()",
}
# Fields of a row that depend on a clock or the machine.
_MEASURED = ("time", "host/", "perf/", "memory/", "compile/", "checkpoint/")
_MEASURED += ("rollout/tokens_per_",)


class Fault(NamedTuple):
  """A fault injected into a run, and its outcome."""

  kind: str
  at: float  # Seconds after the start, or a fraction of a file.
  code: int  # Exit code.
  reached: int  # The last step that it logged, -1 for none.
  lost: int  # Steps that the next start does again.
  said: str


def command(workdir: pathlib.Path) -> list[str]:
  """Starts or resumes the run."""
  return [
    *(sys.executable, str(_ROOT / "scripts" / "train.py")),
    *("--config=configs/vapo.py", f"--workdir={workdir}"),
    *(f"--config.{key}={value}" for key, value in _SETTINGS.items()),
  ]


def start(
  workdir: pathlib.Path,
  *,
  send: int = 0,
  after_s: float = 0.0,
  largest: int = resource.RLIM_INFINITY,
) -> tuple[int, str]:
  """Runs it, perhaps with a signal after some seconds or a limit of a file.

  Returns:
    The exit code, and what it said.
  """

  def limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

  process = subprocess.Popen(
    command(workdir),
    cwd=_ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors="replace",
    preexec_fn=limit,
  )
  try:
    said, _ = process.communicate(timeout=after_s if send else None)
  except subprocess.TimeoutExpired:
    process.send_signal(send)
    said, _ = process.communicate()
  return process.returncode, said


def committed(workdir: pathlib.Path) -> list[int]:
  """The checkpoints, ascending."""
  return sorted(
    int(file.parent.name) for file in workdir.glob("checkpoints/*/COMMIT")
  )


def damage(rng: random.Random, workdir: pathlib.Path) -> str:
  """Damages a file of the newest of two or more checkpoints; says which."""
  found = committed(workdir)
  if len(found) < 2:
    return ""
  folder = workdir / "checkpoints" / str(found[-1])
  files = sorted(
    f for f in folder.rglob("*") if f.is_file() and f.stat().st_size
  )
  file = rng.choice(files)
  data = bytearray(file.read_bytes())
  how = rng.choice(["flipped", "cut", "deleted"])
  if how == "flipped":
    place = rng.randrange(len(data))
    data[place] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
  elif how == "cut":
    file.write_bytes(data[: len(data) // 2])
  else:
    file.unlink()
  return f"{how}: {file.relative_to(workdir / 'checkpoints')}"


def logged(workdir: pathlib.Path) -> int:
  """The last step with a whole row, -1 for none."""
  file = workdir / "metrics.jsonl"
  lines = file.read_text().split("\n")[:-1] if file.exists() else []
  return json.loads(lines[-1])["step"] if lines else -1


def inflict(
  rng: random.Random, kind: str, workdir: pathlib.Path, whole_s: float
) -> Fault:
  """Does a fault of a kind, at a moment that is drawn."""
  at = rng.uniform(0.4, 0.9) * whole_s
  if kind == "kill at start":
    at = rng.uniform(0.1, 0.4) * whole_s
  if kind == "disk":
    at = rng.uniform(1e3, 1e6)
    code, said = start(workdir, largest=int(at))
  else:
    send = signal.SIGTERM if kind == "stop" else signal.SIGKILL
    code, said = start(workdir, send=send, after_s=at)
  good = committed(workdir)
  done = damage(rng, workdir) if kind == "damage" else ""
  if done:
    good.pop()
  reached = logged(workdir)
  lost = reached - good[-1] if good else reached + 1
  told = [s for s in said.splitlines() if "damaged" in s or "cannot write" in s]
  said = done or "; ".join(told)[:120]
  return Fault(kind, at, code, reached, lost, said)


def outcome(workdir: pathlib.Path) -> tuple[list[dict], dict]:
  """Rows without what is measured, and the record of the last checkpoint."""
  rows = [json.loads(s) for s in (workdir / "metrics.jsonl").open()]
  rows = [
    {k: v for k, v in row.items() if not k.startswith(_MEASURED)}
    for row in rows
  ]
  text = (workdir / "checkpoints" / str(_STEPS) / "COMMIT").read_text()
  record = json.loads(text.rpartition("}")[0] + "}")
  return rows, {key: record[key] for key in ("leaves", "states")}


def campaign(folder: pathlib.Path, *, faults: int, seed: int) -> bool:
  """Runs both and compares them; prints the table."""
  whole, broken = folder / "whole", folder / "broken"
  for _ in range(2):  # The second one has what the first one compiled.
    shutil.rmtree(whole, ignore_errors=True)
    begun = time.perf_counter()
    code, said = start(whole)
    whole_s = time.perf_counter() - begun
    if code:
      print(said[-2000:])
      return False
  shutil.rmtree(broken, ignore_errors=True)
  rng, done, again = random.Random(seed), [], 0
  print(
    "| fault | at | exit | reached | done again | |\n|---|---|---|---|---|---|"
  )
  while len(done) < faults:
    kind = _KINDS[len(done) % len(_KINDS)]
    fault = inflict(rng, kind, broken, whole_s)
    again += fault.lost
    done.append(fault)
    print(
      f"| {fault.kind} | {fault.at:.1f} | {fault.code} | {fault.reached} |"
      f" {fault.lost} | {fault.said} |",
      flush=True,
    )
    if fault.reached >= _STEPS:
      # Through: late checkpoints go, so that there is something to break.
      for step in map(str, range(6, _STEPS + 1)):
        shutil.rmtree(broken / "checkpoints" / step, ignore_errors=True)
  code, said = start(broken)
  if code:
    print(said[-2000:])
    return False
  equal = outcome(whole) == outcome(broken)
  print(
    f"\n{len(done)} faults, {again} steps done again; rows and arrays"
    f" {'equal' if equal else 'DIFFER from'} those of the run without faults"
  )
  return equal


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--faults", type=int, default=8)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--out", default="runs/chaos", help="folder")
  options = parser.parse_args(arguments)
  folder = pathlib.Path(options.out).resolve()
  folder.mkdir(parents=True, exist_ok=True)
  equal = campaign(folder, faults=options.faults, seed=options.seed)
  return 0 if equal else 1


if __name__ == "__main__":
  sys.exit(main())
