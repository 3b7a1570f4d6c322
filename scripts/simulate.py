"""Simulates rollout schedules on a machine described by a cost model.

    python scripts/simulate.py [--out=runs/simulate]
    python scripts/simulate.py --median=1024 --max=8192 --p99=2,4,8 --slots=256
    python scripts/simulate.py --assume=devices=16 --assume=train_forwards=10
    python scripts/simulate.py --lengths=FILE

Nothing runs on a device, and every number is simulated. Costs are derived from
device specifications; --assume changes one, see `simulate.accelerator`.
Prints a table for every tail of the length distribution; writes OUT/table.md
and OUT/schedules.png.
"""

import argparse
import dataclasses
import functools
import inspect
import pathlib
import sys

import numpy as np
from parts import program

from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.tools import report, simulate
from jaxrl_llm.tools.report.figure import figure, name_lines

# Formats of table columns that are not printed with three digits.
_FORMATS = {
  "x static": ".2f",
  "slots used": ".0%",
  "off-policy": ".0%",
  "max staleness": "d",
  "mean length": ".0f",
}
# Table columns that are plotted.
_PANELS = {
  "x static": "trained responses/s, relative to static",
  "slots used": "share of slots in use",
  "off-policy": "share of off-policy tokens",
}
_MEANINGS = {
  "static": "static: all slots wait for the longest response",
  "refill": "refill: a free slot takes the next prompt",
  "window": "window: T-PPO, long responses continue in the next step",
}


def read_assumptions(texts: list[str]) -> dict[str, float]:
  """Returns the arguments of `simulate.accelerator` that --assume gives."""
  known, assumed = inspect.signature(simulate.accelerator).parameters, {}
  for text in texts:
    name, _, value = text.partition("=")
    if name not in known:
      raise InputError(
        f"--assume={text}: give NAME=VALUE, NAME one of {', '.join(known)}"
      )
    assumed[name] = _number(f"--assume={name}", value, float)
    if not 0 < assumed[name] < np.inf:
      raise InputError(f"--assume={text}: the number must be above 0")
  return assumed


def make_cost(
  assumed: dict[str, float], share: float | None = None
) -> simulate.CostModel:
  """Makes the cost model from specifications.

  Args:
    assumed: arguments of `simulate.accelerator`.
    share: fraction of the devices that sample while the others train; None if
      all devices alternate between both.
  """
  if share is None:
    return simulate.accelerator(**assumed)
  stated = inspect.signature(simulate.accelerator).parameters["devices"]
  devices = assumed.get("devices", stated.default)
  apart = {"devices": share * devices}
  apart["train_devices"] = devices - share * devices
  return simulate.accelerator(**assumed | apart)


def make_lines(options) -> list[tuple[str, int, dict[float, np.ndarray]]]:
  """Returns (title, maximum length, lengths by tail) per column of panels."""
  size = options.groups * options.steps, options.group_size
  if options.lengths is not None:
    path = pathlib.Path(options.lengths)
    text = functools.partial(np.loadtxt, delimiter=",")
    read = np.load if path.suffix == ".npy" else text
    advice = "give a .npy file, or comma-separated text"
    with as_input_error(f"--lengths={path}", advice, ValueError, EOFError):
      trace = read(path).reshape(-1).astype(np.int64)
      lengths = simulate.resample(trace, *size, seed=options.seed)
    tail = round(float(np.quantile(trace, 0.99) / np.median(trace)), 2)
    return [(path.name, int(trace.max()), {tail: lengths})]
  if len(options.median) != len(options.max):
    raise InputError(
      f"--median and --max must have equally many numbers, got"
      f" {len(options.median)} and {len(options.max)}"
    )
  draw = functools.partial(
    simulate.lognormal, *size, between=options.between, seed=options.seed
  )
  lines = []
  for median, maximum in zip(options.median, options.max):
    lengths = {
      x: draw(median=median, p99=median * x, maximum=maximum)
      for x in options.p99
    }
    lines.append((f"Median {median}, at most {maximum}", maximum, lengths))
  return lines


def make_comparison(options) -> simulate.Comparison:
  """Makes the comparison from the flags that are named like its fields."""
  names = {field.name for field in dataclasses.fields(simulate.Comparison)}
  given = {k: v for k, v in vars(options).items() if k in names}
  price = functools.partial(make_cost, options.assume)
  return simulate.Comparison(**given, price=price)


def make_table(summaries: dict[str, dict[str, float]]) -> str:
  """Returns a Markdown table of simulated numbers, one row per schedule."""
  return report.markdown(
    [
      {"simulated": name}
      | {k: format(v, _FORMATS.get(k, ".3g")) for k, v in summary.items()}
      for name, summary in summaries.items()
    ]
  )


def describe(cost: simulate.CostModel) -> str:
  """Describes the cost model in one line."""
  fields = dataclasses.asdict(cost)
  del fields["padded"]
  plane = "{:.3g} + {:.3g} slots + {:.3g} KV tokens"
  planes = (plane.format(*each) for each in fields.pop("decode"))
  decode = ", or if larger ".join(planes)
  rest = ", ".join(f"{key} {value:.3g}" for key, value in fields.items())
  return f"Costs of used capacity: seconds per decode step {decode}; {rest}."


def draw(title: str, lines: list, path: pathlib.Path) -> None:
  """Plots throughput, slot use and off-policy share against the tail.

  Args:
    title: title of the figure.
    lines: (title, summaries by tail) of each column of panels.
    path: PNG file to write.

  Raises:
    ImportError: matplotlib is missing.
  """
  with figure(path, 3, len(lines), title=title) as (sheet, axes):
    for (line, runs), column in zip(lines, axes.reshape(3, -1).T):
      for axis, (value, label) in zip(column, _PANELS.items()):
        for number, name in enumerate(next(iter(runs.values()))):
          # Curves of equal schedules overlap: use markers of different sizes.
          axis.plot(
            [*runs],
            [summaries[name][value] for summaries in runs.values()],
            label=_MEANINGS.get(name, name),
            marker="osD^vPX"[number % 7],
            markersize=7 - 0.6 * number,
          )
        axis.set(title=line, ylabel=label, ylim=(-0.03, None))
        axis.set_xlabel("99th percentile / median of lengths")
    name_lines(sheet, *axes[0].get_legend_handles_labels())


def run(options) -> None:
  """Compares the schedules, prints tables and plots."""
  parts = [
    "# Rollout schedules, simulated",
    f"{options.slots} slots, {options.groups} prompts x {options.group_size}"
    f" responses per step, steps {options.steps // 3 + 1} to {options.steps},"
    f" prompts of {options.prompt_length} tokens.",
    describe(make_cost(options.assume)),
  ]
  comparison, drawn = make_comparison(options), []
  for title, longest, tails in make_lines(options):
    window, runs = max(1, int(options.window * longest)), {}
    for tail, lengths in tails.items():
      runs[tail] = comparison.run(lengths, window)
      parts.append(
        f"## {title}, p99 {tail:g} x median, windows of {window}\n\n"
        + make_table(runs[tail])
      )
      print(f"\n{parts[-1]}", flush=True)
    drawn.append((title, runs))
  out = pathlib.Path(options.out)
  out.mkdir(parents=True, exist_ok=True)
  text = "\n\n".join(parts) + "\n"
  (out / "table.md").write_text(text, encoding="utf-8")
  batch = f"{options.groups} x {options.group_size} responses per step"
  heading = f"Simulated: {options.slots} slots, {batch}"
  draw(heading, drawn, out / "schedules.png")


def make_parser() -> argparse.ArgumentParser:
  parser = program.make_parser(__doc__)
  add = parser.add_argument
  add("--median", default="1024,4096", help="median lengths")
  add("--max", default="8192,32768", help="maximum length for each median")
  add("--p99", default="1.5,2,4,8", help="99th percentiles / median")
  add("--lengths", metavar="FILE", help="measured lengths to use instead")
  add("--between", type=float, default=0.5, help="variance share of prompts")
  add("--prompt_length", type=int, default=512, help="tokens per prompt")
  add("--slots", type=int, default=512, help="concurrent responses")
  add("--groups", type=int, default=128, help="prompts per training step")
  add("--group_size", type=int, default=16, help="responses per prompt")
  add("--steps", type=int, default=12, help="training steps; 1/3 are warm-up")
  add("--window", type=float, default=0.25, help="T-PPO window / max. length")
  add("--over_provision", default="1.1,1.5", help="started / trained groups")
  add("--max_staleness", type=float, default=4, help="limit with first_groups")
  add("--lags", default="1,2,4", help="lags of asynchronous runs, in steps")
  add("--assume", **program.REPEATED, metavar="NAME=VALUE")
  add("--seed", type=int, default=0)
  add("--out", default="runs/simulate", help="folder")
  return parser


def check(options) -> None:
  """Parses lists and checks ranges.

  Raises:
    InputError: a flag is not a number or out of range.
  """
  for name in ("median", "max", "p99", "over_provision", "lags"):
    kind = int if name in ("median", "max") else float
    least = 0 if name == "lags" else 1
    texts = getattr(options, name).split(",")
    values = [_number(f"--{name}", text, kind) for text in texts]
    if min(values) < least or (name != "lags" and max(values) == np.inf):
      raise InputError(f"--{name}: numbers must be at least {least} and finite")
    setattr(options, name, values)
  sizes = ("prompt_length", "slots", "groups", "group_size", "steps")
  limits = dict.fromkeys((*sizes, "max_staleness"), (1, np.inf))
  limits |= {"between": (0, 1), "window": (0, 1), "seed": (0, np.inf)}
  program.check_ranges(options, **limits)
  options.assume = read_assumptions(options.assume)


def _number(name: str, text: str, kind: type) -> float:
  try:
    value = kind(text)
  except ValueError:
    value = np.nan
  if np.isnan(value):
    raise InputError(f"{name}: {text!r} is not a number")
  return value


@program.one_line
def main(arguments: list[str] | None = None) -> None:
  """Runs the command."""
  options = make_parser().parse_args(arguments)
  check(options)
  run(options)
  print(f"\nwrote {options.out}/table.md and {options.out}/schedules.png")


if __name__ == "__main__":
  sys.exit(main())
