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
import functools
import inspect
import math
import pathlib
import sys

import numpy as np

from jaxrl_llm import report, sampling, simulate
from jaxrl_llm.errors import InputError
from jaxrl_llm.report.figure import figure, name_lines
from jaxrl_llm.rollout.worker import RolloutSettings

BASELINE = "static"
# Columns of a decode call, see sampling.stats.DecodeCall.
_MEASURED = "SLOTS,STEPS,CAPACITY,PREFILLS,PREFILL_TOKENS,SECONDS"
_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)  # Fractions of devices for sampling.
FIXED, FREE = "fixed lag", "free-running, lag"
_TRIAL = 6  # Steps that find the best of them.
# Columns of the table that are not printed with three digits.
_FORMATS = {
  "x static": ".2f",
  "slots used": ".0%",
  "off-policy": ".0%",
  "max staleness": "d",
  "mean length": ".0f",
}
# Schedules in the picture.
_PANELS = {
  "x static": "trained responses/s, relative to static",
  "slots used": "share of slots that write",
  "off-policy": "share of off-policy tokens",
}

Summary = dict[str, float]  # Summary of a run by table column.


def read_assumed(options) -> dict[str, float]:
  """Numbers of --assume by name."""
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
  return assumed


def make_cost(options) -> simulate.CostModel:
  """Prices from stated or measured numbers."""
  assumed = read_assumed(options)
  if options.cost == "accelerator":
    return simulate.accelerator(**assumed)
  if options.measured is None:
    raise InputError(
      "--cost=cpu needs --measured=FILE with a line"
      f" {_MEASURED} for each decode call"
    )
  try:
    fitted = simulate.fit(_table(options.measured))
    return dataclasses.replace(fitted, **assumed)
  except ValueError as error:
    raise InputError(f"--measured={options.measured}: {error}") from error


def divide(options, share: float) -> simulate.CostModel:
  """Prices when a share of the devices samples and the others train."""
  default = inspect.signature(simulate.accelerator).parameters["devices"]
  assumed = {"devices": default.default} | read_assumed(options)
  sampling_devices = share * assumed["devices"]
  training_devices = assumed["devices"] - sampling_devices
  return simulate.accelerator(
    **assumed | {"devices": sampling_devices, "train_devices": training_devices}
  )


def make_lines(options) -> list[tuple[str, int, list[float], list]]:
  """(title, longest, tails, lengths of each), a line of panels each."""
  size = options.groups * options.steps, options.group_size
  if options.lengths is not None:
    trace = _table(options.lengths)
    try:
      whole = trace.reshape(-1).astype(np.int64)
      lengths = simulate.resample(whole, *size, seed=options.seed)
    except ValueError as error:
      raise InputError(f"--lengths={options.lengths}: {error}") from error
    tail = float(np.quantile(trace, 0.99) / np.median(trace))
    name = pathlib.Path(options.lengths).name
    return [(name, int(trace.max()), [round(tail, 2)], [lengths])]
  if len(options.median) != len(options.max):
    raise InputError(
      f"--median and --max belong together, got {len(options.median)} and"
      f" {len(options.max)} numbers"
    )
  lines = []
  for median, maximum in zip(options.median, options.max):
    lengths = [
      simulate.lognormal(
        *size,
        median=median,
        p99=median * tail,
        maximum=maximum,
        between=options.between,
        seed=options.seed,
      )
      for tail in options.p99
    ]
    title = f"Median {median}, at most {maximum}"
    lines.append((title, maximum, options.p99, lengths))
  return lines


def make_schedules(options, window: int) -> dict[str, RolloutSettings]:
  """Returns the schedules that alternate, by name."""
  sizes = {"groups": options.groups, "group_size": options.group_size}
  whole = RolloutSettings(**sizes, in_flight=options.groups)
  schedules = {
    BASELINE: whole,
    "refill": whole,
    "window": dataclasses.replace(whole, window=window),
  }
  for ratio in options.over_provision:
    try:
      schedules[f"over-provisioned {ratio:g}"] = RolloutSettings(
        **sizes,
        in_flight=math.ceil(ratio * options.groups),
        stop="first_groups",
        max_staleness=options.max_staleness,
      )
    except ValueError as error:
      raise InputError(f"--over_provision={ratio:g}: {error}") from error
  return schedules


def make_side_by_side(options, requests, config, schedules) -> dict[str, dict]:
  """Runs that sample and train at once, by name, in kinds.

  What is free-running hands over a group when it ends and takes new weights
  when they are there: most of it depends on the clock, so it does not repeat.
  """
  run = functools.partial(simulate.pipelined, requests, config=config)
  free = functools.partial(
    simulate.asynchronous, requests, config=config, groups=options.groups
  )
  whole, (name, most) = schedules["refill"], list(schedules.items())[-1]
  partial = functools.partial
  lags = [int(lag) for lag in options.lags if lag < math.inf]
  return {
    "periodic": {"periodic": partial(run, settings=whole, streaming=True)},
    FIXED: {
      f"{FIXED} {lag}": partial(run, settings=whole, lag=lag) for lag in lags
    },
    f"{FIXED}, {name}": {
      f"{FIXED} {lag}, {name}": partial(run, settings=most, lag=lag)
      for lag in lags
    },
    FREE: {f"{FREE} {lag:g}": partial(free, lag=lag) for lag in options.lags},
  }


def compare(lengths: np.ndarray, window: int, options) -> dict[str, Summary]:
  """Runs every schedule on the same requests; name -> what came of it.

  The schedules that take turns have all devices for sampling and then for
  training. Where both work at once they divide the same devices, in the way
  that gives the most of a few shares.
  """
  prompts = np.full(len(lengths), options.prompt_length)
  requests = simulate.Requests(prompts, lengths)
  config = sampling.EngineConfig(
    options.slots, options.prompt_length, int(lengths.max()), stop_tokens=()
  )
  schedules = make_schedules(options, window)
  asked = functools.partial(simulate.pipelined, requests, config=config)

  def summary(run, cost, steps):
    rows = run(cost=cost, steps=steps)
    return summarize(rows[steps // 3 :], cost, options.slots)

  out = {}
  for name, settings in schedules.items():
    rule = simulate.static_batches if name == BASELINE else None
    run = functools.partial(asked, settings=settings, rule=rule)
    out[name] = summary(run, make_cost(options), options.steps)
  kinds = {}
  if options.cost == "accelerator":
    kinds = make_side_by_side(options, requests, config, schedules)
  for runs in filter(None, kinds.values()):
    first = next(iter(runs.values()))
    steps = min(_TRIAL, options.steps)
    speeds = [
      summary(first, divide(options, share), steps)["responses/s"]
      for share in _SHARES
    ]
    best = divide(options, _SHARES[np.argmax(speeds)])
    for name, run in runs.items():
      out[name] = summary(run, best, options.steps)
  for summary in out.values():
    summary["x static"] = summary["responses/s"] / out[BASELINE]["responses/s"]
  return out


def summarize(rows, cost: simulate.CostModel, slots: int) -> Summary:
  """Summarizes the steps of a run for table and picture."""
  total = {name: sum(row[name] for row in rows) for name in rows[0]}
  most = {name: max(row[name] for row in rows) for name in rows[0]}
  host_s = cost.scheduler_step_s * total["decode_calls"]
  seconds = {
    "s/step": total["step_s"],
    "generate": total["wall_s"] - total["host_s"],
    "prefill": total["host_s"] - host_s,
    "train": total["train_s"],
    "sync": cost.sync_s * len(rows),
    "idle": host_s + total["waited_s"],
  }
  return {
    "responses/s": total["responses"] / total["step_s"],
    "x static": 1.0,
    **{name: value / len(rows) for name, value in seconds.items()},
    "slots used": total["tokens"] / (slots * total["decode_steps"]),
    "off-policy": total["off_policy"] / total["trained"],
    "max staleness": most["max_staleness"],
    "mean length": total["response_tokens"] / max(total["responses"], 1),
    "peak KV tokens": most["kv_capacity"],
  }


def make_table(summaries: dict[str, Summary]) -> str:
  """A Markdown table, one row a schedule; every number is simulated."""
  return report.markdown(
    [
      {"simulated": name}
      | {k: format(v, _FORMATS.get(k, ".3g")) for k, v in summary.items()}
      for name, summary in summaries.items()
    ]
  )


def describe(cost: simulate.CostModel) -> str:
  """The prices in a line."""
  fields = dataclasses.asdict(cost)
  of_what = "whole programs" if fields.pop("padded") else "what is in use"
  decode = ", or if larger ".join(
    "{:.3g} + {:.3g} slots + {:.3g} KV tokens".format(*plane)
    for plane in fields.pop("decode")
  )
  rest = ", ".join(f"{key} {value:.3g}" for key, value in fields.items())
  return f"Prices of {of_what}: seconds of a decoding step {decode}; {rest}."


def draw(title: str, lines: list, path: pathlib.Path) -> None:
  """Draws throughput, use of slots and off-policy share against the tail.

  Args:
    title: of the picture.
    lines: (title, tails, summaries of each tail) of panels, from the top.
    path: PNG to write.

  Raises:
    ImportError: matplotlib is missing.
  """
  with figure(path, len(lines), 3, title=title) as (sheet, axes):
    for (line, tails, runs), row in zip(lines, axes.reshape(-1, 3)):
      for axis, (column, label) in zip(row, _PANELS.items()):
        for number, name in enumerate(runs[0]):
          # Schedules that agree lie on each other: markers of different size.
          axis.plot(
            tails,
            [summaries[name][column] for summaries in runs],
            label=name,
            marker="osD^vPX"[number % 7],
            markersize=7 - 0.6 * number,
          )
        axis.set(title=line, ylabel=label, ylim=(-0.03, None))
        axis.set_xlabel("99th percentile / median of lengths")
    name_lines(sheet, *axes[0].get_legend_handles_labels())


def run(options) -> None:
  """Compares, prints and draws."""
  parts = [
    "# Schedules of rollouts, simulated",
    f"{options.slots} slots, {options.groups} prompts x {options.group_size}"
    f" responses a step, steps {options.steps // 3 + 1} to {options.steps},"
    f" prompts of {options.prompt_length} tokens.",
    describe(make_cost(options)),
  ]
  drawn = []
  for title, longest, tails, all_lengths in make_lines(options):
    window, runs = max(1, int(options.window * longest)), []
    for tail, lengths in zip(tails, all_lengths):
      runs.append(compare(lengths, window, options))
      parts.append(
        f"## {title}, p99 {tail:g} x median, windows of {window}\n\n"
        + make_table(runs[-1])
      )
      print(f"\n{parts[-1]}", flush=True)
    drawn.append((title, tails, runs))
  out = pathlib.Path(options.out)
  out.mkdir(parents=True, exist_ok=True)
  text = "\n\n".join(parts) + "\n"
  (out / "table.md").write_text(text, encoding="utf-8")
  heading = (
    f"Simulated ({options.cost}): {options.slots} slots, {options.groups} x"
    f" {options.group_size} responses a step"
  )
  draw(heading, drawn, out / "schedules.png")


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
  add("--lags", default="1,2,4", help="of runs that do both at once, in steps")
  add("--cost", choices=("accelerator", "cpu"), default="accelerator")
  add("--measured", metavar="FILE", help=f"lines of {_MEASURED}")
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
