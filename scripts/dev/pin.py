"""Prints checksums of what small runs train, to compare versions of the code.

    python scripts/dev/pin.py [--methods=vapo,lora] [--seed=0] > before.txt

Each run trains a tiny random model for two steps on one CPU. There is a line
for every array and every counter of its last checkpoint, and for every row of
its metrics, without measured times. On the same machine the lines are the same,
unless the code computes other numbers.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / name) for name in ("", "scripts", "tests")]

from helpers import tiny_run  # noqa: E402
from parts import program  # noqa: E402

from jaxrl_llm import digest, register  # noqa: E402
from jaxrl_llm.checkpoint import commit  # noqa: E402
from jaxrl_llm.errors import InputError  # noqa: E402
from jaxrl_llm.trainer import build, loop  # noqa: E402

STEPS = 2
_NO_CRITIC = {"value.pretrain_steps": 0}
_DAPO = {**_NO_CRITIC, "reward.overlong_buffer": 4}
# Run -> its settings; 'method' is the run's name by default.
RUNS = {
  "vapo": {},
  "tppo": {"schedule.window": 5},
  "grpo": _NO_CRITIC,
  "dapo": _DAPO,
  "hapo": _DAPO,
  "vcpo": _NO_CRITIC,
  "asyppo": {},
  "sao": {},
  "distill": _NO_CRITIC,
  "lora": {
    "method": "vapo",
    "model.lora_rank": 4,
    "value.lora_rank": 2,
    "loss.kl_reward_coefficient": 0.01,
  },
}


def lines(name: str, folder: pathlib.Path, seed: int = 0) -> Iterator[str]:
  """Trains one of `RUNS` in an empty folder, and yields its lines."""
  # A random model solves no problem: its groups would have equal rewards.
  register.reward("even", lambda tokens: sum(tokens) % 2 == 0)
  settings = {"method": name, "run.steps": STEPS, "run.seed": seed}
  settings["reward.name"] = "even"
  settings |= RUNS[name]
  if name == "distill":
    wide = dataclasses.replace(tiny_run.model_config(), intermediate_size=64)
    teacher = tiny_run.write_model(folder / "teacher", wide)
    settings["method.distill.teachers"] = str(teacher)
  model = tiny_run.write_model(folder / "model")
  config = tiny_run.make_config(model, settings.pop("method"), **settings)
  with contextlib.redirect_stdout(sys.stderr):
    if loop.train(build.make_run(config), folder / "run"):
      raise InputError(f"{name}: was stopped")
  record = commit.read(folder / "run" / "checkpoints" / str(STEPS), "states")
  for path, leaf in sorted(record["leaves"].items()):
    yield f"{name} {path} {leaf['checksum']}"
  for path, value in sorted(record["states"].items()):
    yield f"{name} {path} {_digest(value)}"
  for row in tiny_run.comparable(folder / "run"):
    yield f"{name} metrics of step {row['step']} {_digest(row)}"


def _digest(value: object) -> str:
  """Returns a digest of a value of JSON."""
  return digest.of_bytes(json.dumps(value, sort_keys=True).encode())


@program.one_line
def main(arguments: list[str] | None = None) -> None:
  """Runs the command line."""
  parser = program.make_parser(__doc__)
  parser.add_argument("--methods", default=",".join(RUNS))
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args(arguments)
  names = options.methods.split(",")
  if unknown := {*names} - {*RUNS}:
    raise InputError(
      f"--methods: no {min(unknown)!r}; choose from {', '.join(RUNS)}"
    )
  for name in names:
    with tempfile.TemporaryDirectory() as folder:
      for line in lines(name, pathlib.Path(folder), options.seed):
        print(line, flush=True)


if __name__ == "__main__":
  sys.exit(main())
