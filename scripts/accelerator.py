"""Measures the parts of a training run on one accelerator in ten minutes.

    make accelerator EXTRA=gpu    # or tpu; without EXTRA: small sizes, on a CPU
    python scripts/accelerator.py [--seconds=600] [--parts=device,decode]
        [--model=FOLDER --data=gsm8k.jsonl]

Each part runs in a separate process on the first device, so that a part that
fails or takes too long does not affect the others:

  device     copy bandwidth and matrix-product throughput
  decode     tokens per second at 1, 16, 64 and 256 slots
  update     policy updates of 0.5B, 1.5B and 7B on packed rows of 8,192 tokens
  attention  training and decoding kernels compared with plain XLA
  agreement  log-probs of sampler and trainer compared, in both precisions
  tail       full rollouts (VAPO) compared with windows (T-PPO) on a long tail
  grpo       GRPO on the built-in task, with its accuracy before and after
  gsm8k      GRPO on GSM8K, with --model and --data

Writes OUT/DEVICE.json and OUT/DEVICE.md after every measurement, and keeps
compiled programs in .jax_cache: an interrupted run loses no results, and the
next one compiles less. Exit code 1 if a part failed, 2 for bad input.
"""

import argparse
import contextlib
import datetime
import functools
import json
import math
import os
import pathlib
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import devices, peers, summary
from parts import program

from jaxrl_llm import metrics
from jaxrl_llm.errors import InputError
from jaxrl_llm.tools import report

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_TAIL_STEPS = {"full": 10, "small": 4}
_WARM_UP = 2  # Steps until windows have truncated responses to continue.
Numbers = dict[str, Any]


def on_device(
  part: str, options: argparse.Namespace, limit_s: float
) -> Iterator[Numbers]:
  """Runs a part of `devices.PARTS` in a separate process.

  Raises:
    InputError: it failed or took too long; numbers yielded before are valid.
  """
  command = [sys.executable, __file__, f"--part={part}"]
  command.append(f"--sizes={options.sizes}")
  for line in peers.run_lines(command, timeout_s=limit_s):
    if line.startswith("{"):
      yield json.loads(line)


def train(flags: list[str], limit_s: float) -> list[dict[str, Any]]:
  """Runs scripts/train.py and returns the rows that it wrote in time.

  Raises:
    InputError: it failed, or did not finish a step in time.
  """
  with tempfile.TemporaryDirectory() as workdir:
    script = str(_ROOT / "scripts" / "train.py")
    command = [sys.executable, script, f"--workdir={workdir}", *flags]
    with contextlib.suppress(peers.OutOfTimeError):
      for _ in peers.run_lines(command, timeout_s=limit_s):
        pass
    rows = pathlib.Path(workdir, "metrics.jsonl")
    found = metrics.read_rows(rows) if rows.exists() else []
  if not found:
    raise InputError(f"train.py took more than {limit_s:.0f} s for a step")
  return found


def measure_tail(
  options: argparse.Namespace, limit_s: float
) -> Iterator[Numbers]:
  """Measures generation time of full rollouts and of windows."""
  rates = {}
  settings = {"value.pretrain_steps": 0, "eval.problems": 2, "eval.samples": 1}
  settings["run.steps"] = _TAIL_STEPS[options.sizes]
  flags = [f"--config.{key}={value}" for key, value in settings.items()]
  for name, method in (("full", "vapo"), ("windows", "tppo")):
    rows = train([f"--config={method}:long_tail", *flags], limit_s / 2)
    if not (rows := rows[1 + _WARM_UP :]):
      raise InputError(f"{name}: no step after the warm-up in {limit_s:.0f} s")
    keys = "time/generate_s", "rollout/decode_steps", "rollout/tokens"
    seconds, steps, tokens = (sum(row[k] for row in rows) for k in keys)
    rates[name] = tokens / seconds
    yield {
      f"{name}_steps": len(rows),
      f"{name}_generate_s": seconds / len(rows),
      f"{name}_decode_steps": steps / len(rows),
      f"{name}_tokens_per_s": rates[name],
    }
  yield {"windows_over_full_tokens_per_s": rates["windows"] / rates["full"]}


def measure_training(
  method: str, settings: str, options: argparse.Namespace, limit_s: float
) -> Iterator[Numbers]:
  """Measures the first and last reward and held-out accuracy of a run."""
  begin_s = time.monotonic()
  flags = [f"--config.{setting}" for setting in settings.split()]
  flags = [flag.format(**vars(options)) for flag in flags]
  rows = train([f"--config={method}", *flags], limit_s)
  yield {"seconds": time.monotonic() - begin_s, "steps": rows[-1]["step"]}
  for end in ("/greedy", "/avg@4", "reward/accuracy"):
    found = [(r["step"], k, r[k]) for r in rows for k in r if k.endswith(end)]
    for step, key, value in found[:1] + found[-1:]:
      yield {f"{key.rpartition('/')[2]}_at_{step}": value}


# Settings of GRPO on GSM8K; braces contain flags of this program.
_GSM8K = """model.path={model} data.path={data} model.dtype=bfloat16
run.steps=1000 eval.problems=64 eval.greedy=True eval.every=25"""
# Name -> function that measures the part, and its share of the time. Time that
# a part does not use goes to the later parts.
PARTS: dict[str, tuple[Callable[..., Iterator[Numbers]], float]] = {
  **{
    name: (functools.partial(on_device, name), share)
    for name, share in zip(devices.PARTS, (30, 130, 130, 60, 60))
  },
  "tail": (measure_tail, 80),
  "grpo": (functools.partial(measure_training, "grpo", ""), 80),
  "gsm8k": (
    functools.partial(measure_training, "grpo:gsm8k-smoke", _GSM8K),
    200,
  ),
}


def measure_all(
  parts: list[str],
  options: argparse.Namespace,
  save: Callable[[Numbers], None],
) -> None:
  """Measures parts; calls `save` with all results after each measurement."""
  end_s = time.monotonic() + options.seconds
  found, errors = {}, {}
  for i, name in enumerate(parts):
    measure, share = PARTS[name]
    left = end_s - time.monotonic()
    limit_s = left * share / sum(PARTS[other][1] for other in parts[i:])
    started_s, numbers = time.monotonic(), found.setdefault(name, {})
    try:
      for more in measure(options, limit_s):
        numbers |= more
        print(f"{name}: {json.dumps(more)}", flush=True)
        save({"parts": found, "errors": errors})
    except InputError as error:
      errors[name] = str(error)
    took = time.monotonic() - started_s
    print(f"{name}: {took:.0f} s {errors.get(name, '')}", flush=True)
    save({"parts": found, "errors": errors})


def table(record: Numbers) -> str:
  """Returns the record as Markdown."""
  machine, device = record["machine"], record["parts"].get("device", {})
  versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
  product = device.get("matmul_flops_per_s")
  peaks = {
    "_bytes_per_s": device.get("copy_bytes_per_s"),
    "_flops_per_s": device.get("data_sheet_flops_per_s", product),
  }
  rows = []
  for part, numbers in record["parts"].items():
    for key, value in numbers.items():
      peak = next((p for end, p in peaks.items() if key.endswith(end)), None)
      share = f"{value / peak:.2f}" if peak and part != "device" else ""
      shown = f"{value:.4g}" if isinstance(value, float) else str(value)
      rows.append((part, f"`{key}`", shown, share))
  rows += [(part, "failed", why, "") for part, why in record["errors"].items()]
  titles = ("part", "measured", "value", "share of the peak")
  return f"""# {record["device"]}

`{record["command"]}`, {record["date"]}, {record["sizes"]} sizes, on \
{machine["processor"]}, {machine["cpus"]} CPUs; {versions}.

The peak is the measured copy bandwidth for bytes (a share above 1: the data fit
in a cache), and the data sheet's value for floating-point operations, or the
measured rate of a large matrix product if that is unknown.

{report.markdown([dict(zip(titles, row)) for row in rows])}
"""


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = program.make_parser(__doc__)
  add = parser.add_argument
  add("--parts", help="comma-separated; default: all")
  add("--seconds", type=float, default=600.0, help="total time limit")
  add("--sizes", choices=devices.SIZES, help="default: small on a CPU")
  add("--out", default="docs/accelerator", help="output folder")
  add("--model", default="", help="Hugging Face folder, for gsm8k")
  add("--data", default="", help="JSONL of questions and answers, for gsm8k")
  add("--part", choices=devices.PARTS, help=argparse.SUPPRESS)
  return parser


@program.one_line
def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  options = make_parser().parse_args(arguments)
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_ROOT / ".jax_cache"))
  if options.part:
    for numbers in devices.PARTS[options.part](devices.SIZES[options.sizes]):
      print(json.dumps(numbers), flush=True)
    return 0
  own = bool(options.model and options.data)
  every = [name for name in PARTS if own or name != "gsm8k"]
  parts = options.parts.split(",") if options.parts else every
  for name in parts:
    if name not in PARTS:
      raise InputError(f"--parts: {name!r} must be one of {', '.join(PARTS)}")
    if name not in every:
      raise InputError(f"--parts={name} needs --model and --data")
  program.check_ranges(options, seconds=(1, math.inf))
  # A separate process queries the device, so that this one does not hold it.
  found = "import json, jax; d = jax.devices()[0];"
  found += "print(json.dumps({'platform': d.platform, 'kind': d.device_kind}))"
  asked = [sys.executable, "-P", "-c", found]
  try:
    device = peers.run_program(asked, timeout_s=options.seconds)
  except InputError as error:
    raise InputError(f"no device: {error}") from error
  if not options.sizes:
    options.sizes = "small" if device["platform"] == "cpu" else "full"
  about = {
    "device": device["kind"],
    "sizes": options.sizes,
    "command": shlex.join(["python", "scripts/accelerator.py", *sys.argv[1:]]),
    "date": datetime.date.today().isoformat(),
    **summary.describe_machine(),
  }
  out = pathlib.Path(options.out)
  out.mkdir(parents=True, exist_ok=True)
  name = re.sub(r"[^a-z0-9]+", "-", device["kind"].lower())
  record = {}

  def save(found: Numbers) -> None:
    record.update(about, **found)
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / f"{name}.md").write_text(table(record))

  measure_all(parts, options, save)
  print(f"wrote {out / name}.json and .md")
  return 1 if record["errors"] else 0


if __name__ == "__main__":
  sys.exit(main())
