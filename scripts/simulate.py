"""Simulates schedules of rollouts on a machine given by prices.

    python scripts/simulate.py [--out=runs/simulate]
    python scripts/simulate.py --median=1024 --max=8192 --p99=2,4,8 --slots=256
    python scripts/simulate.py --assume=devices=16 --assume=train_forwards=10
    python scripts/simulate.py --cost=cpu --measured=calls.csv --lengths=FILE

Nothing runs on a device and every number is simulated. --cost=accelerator takes
its prices from stated numbers (--assume changes one, see
jaxrl_llm.simulate.accelerator). --cost=cpu fits them to measured calls of
decoding (--assume adds others, see CostModel: training is free otherwise) and
leaves asynchronous runs out, as one machine cannot do both at a time. Prints a
table for every tail of the lengths; writes OUT/table.md and OUT/schedules.png.
"""

import argparse
import dataclasses
import inspect
import pathlib
import sys

import numpy as np

from jaxrl_llm import simulate
from jaxrl_llm.errors import InputError
from jaxrl_llm.simulate import compare, picture


def make_cost(options) -> simulate.CostModel:
  """Prices from stated or measured numbers."""
  if options.cost == "accelerator":
    known = list(inspect.signature(simulate.accelerator).parameters)
  else:
    known = [field.name for field in dataclasses.fields(simulate.CostModel)]
    known = [name for name in known if name.endswith("_s")]
  assumed = {}
  for text in options.assume:
    name, _, value = text.partition("=")
    if name not in known:
      raise InputError(
        f"--assume={text}: give NAME=VALUE with a name of {', '.join(known)}"
      )
    assumed[name] = _number(f"--assume={name}", value, float)
    if not 0 < assumed[name] < np.inf:
      raise InputError(f"--assume={text}: the number must be above 0")
  if options.cost == "accelerator":
    return simulate.accelerator(**assumed)
  if options.measured is None:
    raise InputError(
      "--cost=cpu needs --measured=FILE with a line"
      " SLOTS,STEPS,CAPACITY,SECONDS for each decode call"
    )
  try:
    fitted = simulate.fit(_table(options.measured))
    return dataclasses.replace(fitted, **assumed)
  except ValueError as error:
    raise InputError(f"--measured={options.measured}: {error}") from error


def make_lines(options) -> list[tuple[str, int, list[float], list]]:
  """(title, longest, tails, requests of each), a line of panels each."""
  prompts = options.groups * options.steps
  if options.lengths is not None:
    trace = _table(options.lengths)
    try:
      requests = simulate.resample(
        trace.reshape(-1).astype(np.int64),
        prompts,
        options.group_size,
        prompt_length=options.prompt_length,
        seed=options.seed,
      )
    except ValueError as error:
      raise InputError(f"--lengths={options.lengths}: {error}") from error
    tail = float(np.quantile(trace, 0.99) / np.median(trace))
    name = pathlib.Path(options.lengths).name
    return [(name, int(trace.max()), [round(tail, 2)], [requests])]
  if len(options.median) != len(options.max):
    raise InputError(
      f"--median and --max belong together, got {len(options.median)} and"
      f" {len(options.max)} numbers"
    )
  lines = []
  for median, maximum in zip(options.median, options.max):
    requests = [
      simulate.lognormal(
        prompts,
        options.group_size,
        median=median,
        p99=median * tail,
        maximum=maximum,
        prompt_length=options.prompt_length,
        between=options.between,
        seed=options.seed,
      )
      for tail in options.p99
    ]
    title = f"Median {median}, at most {maximum}"
    lines.append((title, maximum, options.p99, requests))
  return lines


def run(options) -> str:
  """Compares and draws; returns the text of the tables."""
  cost = make_cost(options)
  setting = simulate.Setting(
    slots=options.slots, groups=options.groups, steps=options.steps
  )
  warm_up = options.steps // 3
  parts = [
    "# Schedules of rollouts, simulated",
    f"{options.slots} slots, {options.groups} prompts x {options.group_size}"
    f" responses a step, steps {warm_up + 1} to {options.steps}, prompts of"
    f" {options.prompt_length} tokens.",
    compare.describe(cost),
  ]
  drawn = []
  for title, longest, tails, all_requests in make_lines(options):
    window, runs = max(1, int(options.window * longest)), []
    for tail, requests in zip(tails, all_requests):
      traces = compare.compare(
        requests,
        cost,
        setting,
        window=window,
        over_provision=options.over_provision,
        max_staleness=options.max_staleness,
        lags=options.lags if options.cost == "accelerator" else (),
      )
      text = compare.table(traces, warm_up=warm_up)
      parts.append(
        f"## {title}, p99 {tail:g} x median, windows of {window}\n\n{text}"
      )
      print(f"\n{parts[-1]}", flush=True)
      runs.append({k: v.after(warm_up) for k, v in traces.items()})
    drawn.append(picture.Line(title, tails, runs))
  out = pathlib.Path(options.out)
  out.mkdir(parents=True, exist_ok=True)
  text = "\n\n".join(parts) + "\n"
  (out / "table.md").write_text(text, encoding="utf-8")
  heading = (
    f"Simulated ({options.cost}): {options.slots} slots, {options.groups} x"
    f" {options.group_size} responses a step"
  )
  picture.draw(heading, drawn, out / "schedules.png")
  return text


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--median", default="1024,4096", help="of lengths, a line of panels each")
  add("--max", default="8192,32768", help="longest responses, as many")
  add("--p99", default="1.5,2,4,8", help="99th percentiles, in medians")
  add("--lengths", metavar="FILE", help="of a real run, instead of the three")
  add("--between", type=float, default=0.5, help="variance due to prompts")
  add("--prompt_length", type=int, default=512, help="tokens")
  add("--slots", type=int, default=512, help="responses written at a time")
  add("--groups", type=int, default=128, help="prompts of a training step")
  add("--group_size", type=int, default=16, help="responses per prompt")
  add("--steps", type=int, default=12, help="of training; a third warms up")
  add("--window", type=float, default=0.25, help="of T-PPO, in longest lengths")
  add(
    "--over_provision", default="1.1,1.5", help="groups begun per group trained"
  )
  add(
    "--max_staleness",
    type=float,
    default=4,
    help="of over-provisioned responses",
  )
  add("--lags", default="1,4", help="of asynchronous runs, in steps")
  add("--cost", choices=("accelerator", "cpu"), default="accelerator")
  add("--measured", metavar="FILE", help="SLOTS,STEPS,CAPACITY,SECONDS lines")
  add("--assume", action="append", default=[], metavar="NAME=VALUE")
  add("--seed", type=int, default=0)
  add("--out", default="runs/simulate", help="folder")
  return parser


def check(options) -> None:
  """Reads lists and refuses numbers out of range.

  Raises:
    InputError: one of them cannot be used.
  """
  for name in ("median", "max", "p99", "over_provision", "lags"):
    kind = int if name in ("median", "max") else float
    least = 0 if name == "lags" else 1
    texts = getattr(options, name).split(",")
    values = [_number(f"--{name}", text, kind) for text in texts]
    if min(values) < least or (name != "lags" and max(values) == np.inf):
      raise InputError(f"--{name}: numbers must be at least {least} and finite")
    setattr(options, name, values)
  for name in ("prompt_length", "slots", "groups", "group_size", "steps"):
    if getattr(options, name) < 1:
      raise InputError(f"--{name}={getattr(options, name)} must be at least 1")
  for name in ("between", "window"):
    if not 0 <= getattr(options, name) <= 1:
      raise InputError(f"--{name}={getattr(options, name)} must be 0..1")
  if not options.max_staleness >= 1:
    raise InputError(
      f"--max_staleness={options.max_staleness} must be at least 1"
    )


def _number(name, text, kind):
  try:
    value = kind(text)
  except ValueError as error:
    raise InputError(f"{name}: {text!r} is no number") from error
  if value != value:
    raise InputError(f"{name}: {text!r} is no number")
  return value


def _table(path: str) -> np.ndarray:
  """Numbers of a .npy file, or of text with commas."""
  try:
    if path.endswith(".npy"):
      return np.load(path)
    return np.loadtxt(path, delimiter=",", ndmin=1)
  except ValueError as error:
    raise InputError(f"{path}: {error}") from error


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code, 2 for bad input."""
  options = make_parser().parse_args(arguments)
  try:
    check(options)
    run(options)
  except ImportError:
    print("matplotlib is missing: pip install -e '.[plot]'", file=sys.stderr)
    return 2
  except (InputError, OSError) as error:
    print(f"simulate: {error}", file=sys.stderr)
    return 2
  print(f"\nwrote {options.out}/table.md and {options.out}/schedules.png")
  return 0


if __name__ == "__main__":
  sys.exit(main())
