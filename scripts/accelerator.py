"""Measures what one accelerator makes of a run, within ten minutes.

    make accelerator EXTRA=gpu    # or tpu; without EXTRA small, on the CPU
    python scripts/accelerator.py [--seconds=600] [--parts=device,decode]

Parts, each a program of its own on the first device, so that one which fails or
takes too long costs no other:

  device     bytes that it copies and products that it makes in a second
  agreement  log-probs of the sampler against the trainer's, in both precisions
  decode     tokens per second at 1, 16, 64 and 256 slots
  update     policy updates on packed rows of 8,192 tokens
  peers      rollouts beside other libraries, where they are installed
  tail       full rollouts (VAPO) against windows (T-PPO) on a long tail
  grpo       GRPO on the embedded task, its accuracy before and after

Writes OUT/DEVICE.json and OUT/DEVICE.md. Exit code 1 if a part failed, 2 for
bad input.
"""

import argparse
import datetime
import functools
import importlib.util
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import devices, peers, summary
from parts import program

from jaxrl_llm import metrics, report
from jaxrl_llm.errors import InputError

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# Peer -> the module that it is.
_PEERS = {"hf": "transformers", "tunix": "tunix"}
_PEER_PROGRAM = _ROOT / "scripts" / "dev" / "peer_rollouts.py"  # Of a clone.
_TAIL_STEPS = {"full": 10, "small": 4}
_WARM_UP = 2  # Steps until windows have something to go on with.
Numbers = dict[str, Any]


def on_device(part: str, sizes: str, limit_s: float) -> Numbers:
  """Runs a part of `devices.PARTS` as a program of its own."""
  command = [sys.executable, __file__, f"--part={part}", f"--sizes={sizes}"]
  return peers.run_program(command, timeout_s=limit_s)


def train(flags: list[str], limit_s: float) -> list[dict[str, Any]]:
  """Rows of a run of scripts/train.py, those that it had time for.

  Raises:
    InputError: it failed, or had time for none.
  """
  with tempfile.TemporaryDirectory() as workdir:
    command = [sys.executable, "scripts/train.py", f"--workdir={workdir}"]
    how = {"cwd": _ROOT, "capture_output": True, "text": True, "check": True}
    try:
      subprocess.run(command + flags, timeout=limit_s, **how)
    except subprocess.TimeoutExpired:
      pass
    except subprocess.CalledProcessError as error:
      said = error.stderr.strip().splitlines() or ["nothing on stderr"]
      raise InputError(f"train.py: {said[-1]}") from None
    rows = pathlib.Path(workdir, "metrics.jsonl")
    found = metrics.read_rows(rows) if rows.exists() else []
  if not found:
    raise InputError(f"train.py took more than {limit_s:.0f} s for a step")
  return found


def measure_tail(sizes: str, limit_s: float) -> Numbers:
  """Seconds that generating takes, whole responses or windows of them."""
  out, begin_s = {}, time.monotonic()
  settings = {"run.steps": _TAIL_STEPS[sizes], "value.pretrain_steps": 0}
  settings |= {"eval.problems": 2, "eval.samples": 1}
  flags = [f"--config.{key}={value}" for key, value in settings.items()]
  for name, method in (("full", "vapo"), ("windows", "tppo")):
    left = limit_s - (time.monotonic() - begin_s)
    if name == "full":
      left /= 2
    rows = train([f"--config=configs/{method}.py:long_tail", *flags], left)
    if not (rows := rows[1 + _WARM_UP :]):
      raise InputError(f"{name}: no step after the warm-up in {limit_s:.0f} s")
    keys = "time/generate_s", "rollout/decode_steps", "rollout/tokens"
    seconds, steps, tokens = (sum(row[k] for row in rows) for k in keys)
    out |= {
      f"{name}_steps": len(rows),
      f"{name}_generate_s": seconds / len(rows),
      f"{name}_decode_steps": steps / len(rows),
      f"{name}_tokens_per_s": tokens / seconds,
    }
  ratio = out["windows_tokens_per_s"] / out["full_tokens_per_s"]
  return out | {"windows_over_full_tokens_per_s": ratio}


def measure_grpo(sizes: str, limit_s: float) -> Numbers:
  """Held-out accuracy of the embedded job, first and last."""
  del sizes  # It is small everywhere.
  begin_s = time.monotonic()
  rows = train(["--config=configs/grpo.py"], limit_s)
  tested = [row for row in rows if any("/greedy" in key for key in row)]
  out = {"seconds": time.monotonic() - begin_s, "steps": rows[-1]["step"]}
  for row in (tested[0], tested[-1]):
    for key, value in row.items():
      if key.startswith("eval/") and key.endswith(("/greedy", "/avg@4")):
        out[f"{key.rpartition('/')[2]}_at_{row['step']}"] = value
  return out


def measure_peers(sizes: str, limit_s: float) -> Numbers:
  """Rollouts beside the libraries that are here; empty without any."""
  del sizes  # Peers know the shapes of scripts/benchmark.py.
  work = ["--prompts=8", "--batch=64", "--new_tokens=128", "--p99=128"]
  found = [k for k, v in _PEERS.items() if importlib.util.find_spec(v)]
  program_of = lambda name: [sys.executable, str(_PEER_PROGRAM), name, *work]
  others = [f"{name}={shlex.join(program_of(name))}" for name in found]
  if not (others and _PEER_PROGRAM.exists()):
    return {}
  ours = str(_ROOT / "scripts" / "benchmark.py")
  command = [sys.executable, ours, "rollouts", *work]
  command += ["--group_size=8", "--repeats=1", "--rounds=1"]
  command += [f"--peer={other}" for other in others]
  record = peers.run_program(command, timeout_s=limit_s)
  out = {f"{k}_error": text for k, text in record["errors"].items()}
  for name, one in (record["peers"] | {"ours": record}).items():
    out[f"{name}_tokens_per_s"] = one["medians"]["tokens_per_s"]
  return out


_Part = Callable[[str, float], Numbers]
# Name -> function that measures it, and its limit in seconds. All take ten
# minutes at most; the last part uses the remaining time.
PARTS: dict[str, tuple[_Part, float]] = {
  **{
    name: (functools.partial(on_device, name), seconds)
    for name, seconds in zip(devices.PARTS, (40, 60, 120, 120))
  },
  "peers": (measure_peers, 60),
  "tail": (measure_tail, 120),
  "grpo": (measure_grpo, 600),
}


def measure_all(parts: list[str], sizes: str, seconds: float) -> Numbers:
  """Numbers of the parts, and what went wrong."""
  begin_s = time.monotonic()
  found, errors = {}, {}
  for name in parts:
    measure, share = PARTS[name]
    left = seconds - (time.monotonic() - begin_s)
    started_s = time.monotonic()
    try:
      found[name] = measure(sizes, min(share * seconds / 600, left))
    except InputError as error:
      errors[name] = str(error)
    took = time.monotonic() - started_s
    print(f"{name}: {took:.0f} s {errors.get(name, '')}", flush=True)
  return {"parts": found, "errors": errors}


def table(record: Numbers) -> str:
  """The record as Markdown."""
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

Shares of bytes are of what the device copies (above 1: they fit a cache), those
of floating-point operations of its data sheet, or of a large product where that
is not known.

{report.markdown([dict(zip(titles, row)) for row in rows])}
"""


def make_parser() -> argparse.ArgumentParser:
  """The command line."""
  parser = program.make_parser(__doc__)
  add = parser.add_argument
  add("--parts", default=",".join(PARTS), help="of them, all by default")
  add("--seconds", type=float, default=600.0, help="for all parts together")
  add("--sizes", choices=devices.SIZES, help="by default small on a CPU")
  add("--out", default="docs/accelerator", help="folder of the results")
  add("--part", choices=devices.PARTS, help=argparse.SUPPRESS)
  return parser


@program.one_line
def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  options = make_parser().parse_args(arguments)
  if options.part:
    numbers = devices.PARTS[options.part](devices.SIZES[options.sizes])
    print(json.dumps(numbers), flush=True)
    return 0
  parts = options.parts.split(",")
  for name in parts:
    if name not in PARTS:
      raise InputError(f"--parts: {name!r} must be one of {', '.join(PARTS)}")
  if options.seconds <= 0:
    raise InputError(f"--seconds={options.seconds:g} must be more than 0")
  # A process of its own asks for the device: this one must not hold it.
  found = "import json, jax; d = jax.devices()[0];"
  found += "print(json.dumps({'platform': d.platform, 'kind': d.device_kind}))"
  asked = [sys.executable, "-c", found]
  try:
    device = peers.run_program(asked, timeout_s=options.seconds)
  except InputError as error:
    raise InputError(f"no device: {error}") from error
  sizes = options.sizes or ("small" if device["platform"] == "cpu" else "full")
  record = {
    "device": device["kind"],
    "sizes": sizes,
    "command": shlex.join(["python", "scripts/accelerator.py", *sys.argv[1:]]),
    "date": datetime.date.today().isoformat(),
    **summary.describe_machine(),
    **measure_all(parts, sizes, options.seconds),
  }
  out = pathlib.Path(options.out)
  out.mkdir(parents=True, exist_ok=True)
  name = re.sub(r"[^a-z0-9]+", "-", device["kind"].lower())
  (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
  (out / f"{name}.md").write_text(table(record))
  print(f"wrote {out / name}.json and .md")
  return 1 if record["errors"] else 0


if __name__ == "__main__":
  sys.exit(main())
