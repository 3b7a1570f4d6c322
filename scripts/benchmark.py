"""Measures speed and memory, alone or compared with other programs.

  python scripts/benchmark.py sampler [--shape=smollm2-135m]
  python scripts/benchmark.py train_step --peer "NAME=COMMAND" --rounds=3
  python scripts/benchmark.py prefill --prompt_length=512
  TAIL="--batch=64 --group_size=8 --new_tokens=768"
  python scripts/benchmark.py rollouts $TAIL
  python scripts/benchmark.py simulator $TAIL
  python scripts/benchmark.py estimators
  python scripts/benchmark.py checkpoint --megabytes=400

Prints readable rows and, as the last line, one JSON object. Weights are random,
every response has full length (in rollouts and simulator, lengths are lognormal
with a long tail), and compilation is not counted. A --peer runs alternately
with a fresh process of this benchmark; see docs/benchmarks.md. Exit code 1 if a
peer failed (after our own numbers), 2 for bad input.
"""

import argparse
import math
import os
import sys
from typing import Any

from benchmarks import (
  checkpoints,
  peers,
  summary,
  tail,
  train_steps,
  workloads,
)
from parts import program

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import transformer

_MODEL = "shape sampler_dtype batch prompt_length new_tokens repeats"
_TAIL = f"{_MODEL} prompts group_size median p99"
_STEP = f"{_MODEL} group_size micro_batch_size max_tokens_per_row remat_policy"
_LOOP = "numpy_loop"
# Part -> function that measures it, and the options that it depends on.
PARTS = {
  "sampler": (workloads.measure_sampler, f"{_MODEL} slots"),
  "rollouts": (workloads.measure_rollouts, _TAIL),
  "prefill": (workloads.measure_prefill, _MODEL),
  "simulator": (workloads.measure_simulator, _TAIL),
  "train_step": (train_steps.measure_train_step, _STEP),
  "estimators": (workloads.measure_estimators, "rows length repeats"),
  "checkpoint": (checkpoints.measure_checkpoint, "megabytes repeats"),
}


def settings_of(options) -> dict[str, Any]:
  """Returns the options that the part depends on."""
  names = PARTS[options.part][1].split()
  return {name: getattr(options, name) for name in names}


def alone_command(options) -> list[str]:
  """Returns the command that repeats the measurement without peers."""
  flags = [f"--{name}={value}" for name, value in settings_of(options).items()]
  return [sys.executable, os.path.abspath(__file__), options.part, *flags]


def run(options) -> dict[str, Any]:
  """Measures, alone or with peers; returns the record to print."""
  load = os.getloadavg()
  if options.peers:
    result = peers.side_by_side(alone_command(options), options)
  else:
    summary.wait_until_idle(options.wait_idle)
    result = summary.summarize(PARTS[options.part][0](options))
    result |= {"ratios": {}, "peers": {}, "errors": {}}
  medians = result["medians"]
  if loop_s := medians.get(f"{_LOOP}_gae_s"):
    loop = {"gae_s": loop_s}
    result["ratios"][_LOOP] = summary.speed_ratios(medians, loop)
  return (
    {"part": options.part, "settings": settings_of(options)}
    | result
    | summary.describe_machine()
    | {"load_before": load, "load_after": os.getloadavg()}
  )


def make_parser() -> argparse.ArgumentParser:
  parser = program.make_parser(__doc__)
  parser.add_argument("part", choices=PARTS)
  add = parser.add_argument
  tail.add_flags(parser)
  help_ = "data type of the sampler's weights and matrix products"
  add("--sampler_dtype", **program.DTYPE, help=help_)
  add("--slots", type=int, help="slots of the sampler; default: --batch")
  add("--micro_batch_size", type=int, default=4, help="rows per micro-batch")
  row = "tokens per packed row; default: one prompt with its response"
  add("--max_tokens_per_row", type=int, help=row)
  remat = {"choices": list(transformer.REMAT_POLICIES), "default": "full"}
  add("--remat_policy", **remat, help="what the backward pass recomputes")
  add("--rows", type=int, default=512, help="rows of estimators")
  add("--length", type=int, default=24576, help="tokens per row of estimators")
  add("--megabytes", type=int, default=400, help="size of the checkpoint")
  add("--repeats", type=int, default=3, help="timed runs after a warm-up")
  several = program.REPEATED | {"metavar": "NAME=COMMAND"}
  add("--peer", **several, help="program that prints JSON; repeatable")
  add("--rounds", type=int, default=2, help="rounds with peers: A B, B A, ...")
  add("--timeout_s", type=float, default=3600.0, help="limit per program")
  add("--wait_idle", type=float, default=0.0, help="max. wait for idle cores")
  return parser


def check(options) -> None:
  """Completes the options.

  Raises:
    InputError: one of them cannot be used.
  """
  counts = [name for name, x in vars(options).items() if type(x) is int]
  program.check_ranges(options, **dict.fromkeys(counts, (1, math.inf)))
  longest = options.prompt_length + options.new_tokens
  options.slots = options.slots or options.batch
  options.max_tokens_per_row = options.max_tokens_per_row or longest
  if options.batch % options.group_size:
    raise InputError(
      f"--batch={options.batch} must be a multiple of"
      f" --group_size={options.group_size}"
    )
  if options.max_tokens_per_row < longest:
    raise InputError(
      f"--max_tokens_per_row={options.max_tokens_per_row} must fit a response"
      f" with its prompt, {longest} tokens"
    )
  options.peers = {}
  for peer in options.peer:
    name, _, command = peer.partition("=")
    if not (name and command) or name == "ours":
      raise InputError(
        f"--peer={peer!r} must be NAME=COMMAND, with a name other than 'ours'"
      )
    if name in options.peers:
      raise InputError(f"--peer: two peers are named {name!r}")
    options.peers[name] = command


@program.one_line
def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  options = make_parser().parse_args(arguments)
  check(options)
  record = run(options)
  summary.show(record)
  for name, error in record["errors"].items():
    print(f"benchmark: peer {name}: {error}", file=sys.stderr)
  return 1 if record["errors"] else 0


if __name__ == "__main__":
  sys.exit(main())
