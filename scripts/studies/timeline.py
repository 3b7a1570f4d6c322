"""Plots what sampler and learner of a run do at the same time.

    XLA_FLAGS="--xla_force_host_platform_device_count=2 \
        --xla_cpu_multi_thread_eigen=false" \
        python scripts/study.py timeline [--steps=6] [--out=runs/timeline]

Runs GRPO on the shipped base model with sampler and learner on separate
devices, one core each: sequentially, with `schedule.streaming` and with
`schedule.lag`. Prints the seconds per step and writes OUT/timeline.csv
(schedule, side, phase, begin and end in seconds), OUT/table.md and
OUT/timeline.png. All exclude compilation: each schedule is warmed up first.
"""

import argparse
import contextlib
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from parts import program
from studies.results import write_csv

from jaxrl_llm import config as config_lib
from jaxrl_llm import metrics
from jaxrl_llm.errors import InputError
from jaxrl_llm.tools import report
from jaxrl_llm.tools.report.figure import figure, name_lines
from jaxrl_llm.trainer import build, loop

SCHEDULES = {
  "sequential": {},
  "streaming": {"schedule.streaming": True},
  "lag 1": {"schedule.lag": 1},
}
_WAITS = "wait"  # The phase in which the learner is idle.
# Sides of phases that are not the learner's.
_SIDES = {"data": "sampler", "generate": "sampler", "reward": "rewards"}


class Span(NamedTuple):
  """A phase of the sampler, the learner or the rewards, in seconds."""

  side: str
  phase: str
  begin_s: float
  end_s: float


class Recorder(metrics.PhaseTimer):
  """A phase timer that also records each span."""

  def __init__(self):
    """Starts without spans."""
    super().__init__()
    self.spans: list[Span] = []

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Times a phase like the parent class, and records its span."""
    begin_s = time.perf_counter()
    with super().phase(name):
      yield
    side = _SIDES.get(name, "learner")
    self.spans.append(Span(side, name, begin_s, time.perf_counter()))


def make_config(name: str) -> Any:
  """Returns GRPO with one update per step, on a device per side."""
  config = config_lib.method("grpo", **SCHEDULES[name])
  config.mesh.data = config.sampler.mesh.data = 1
  config.sampler.parity_check_every = config.run.samples_every = 0
  config.optimizer.policy.mini_batch = 0
  return config


def measure(name: str, steps: int, warm_up: int) -> tuple[list[Span], float]:
  """Returns the spans of some steps after a warm-up, and seconds per step."""
  run, recorder = build.make_run(make_config(name)), Recorder()
  with contextlib.closing(run.judge):
    states, weights = loop.begin(run)
    for step in range(warm_up + steps):
      if step == warm_up:
        recorder.spans.clear()
        begin_s = time.perf_counter()
      states, weights, _ = loop.iterate(run, states, weights, recorder, None)
    seconds = time.perf_counter() - begin_s
  return [
    span._replace(begin_s=span.begin_s - begin_s, end_s=span.end_s - begin_s)
    for span in recorder.spans
  ], seconds / steps


def busy(spans: list[Span], side: str) -> float:
  """Returns the seconds in which a side was busy."""
  own = [x for x in spans if x.side == side and x.phase != _WAITS]
  return sum(span.end_s - span.begin_s for span in own)


def draw(spans_of: dict[str, list[Span]], path: pathlib.Path) -> None:
  """Plots one panel per schedule, one bar per side, one colour per phase."""
  phases = dict.fromkeys(s.phase for spans in spans_of.values() for s in spans)
  phases.pop(_WAITS, None)
  colors = {name: f"C{i}" for i, name in enumerate(phases)}
  last_s = max(span.end_s for spans in spans_of.values() for span in spans)
  title = "Timeline: measured on two CPU devices, one core each"
  with figure(path, len(spans_of), 1, title=title) as (sheet, axes):
    sheet.set_size_inches(8.5, 2 * len(spans_of) + 1)
    for (name, spans), axis in zip(spans_of.items(), axes.reshape(-1)):
      sides = sorted({span.side for span in spans})
      for phase, color in colors.items():
        here = [span for span in spans if span.phase == phase]
        axis.barh(
          [sides.index(span.side) for span in here],
          [span.end_s - span.begin_s for span in here],
          left=[span.begin_s for span in here],
          color=color,
          label=phase,
        )
      axis.set_axisbelow(True)
      axis.set_yticks(range(len(sides)), sides)
      axis.set(title=name, xlim=(0, last_s))
    axis.set_xlabel("seconds")
    name_lines(sheet, *axis.get_legend_handles_labels())


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of the command line."""
  add = parser.add_argument
  add("--steps", type=int, default=6, help="measured steps")
  add("--warm_up", type=int, default=8, help="steps before them, to compile")
  add("--out", default="runs/timeline", help="output folder")


def run(options: argparse.Namespace) -> None:
  """Measures, prints and plots."""
  limits = {"steps": (1, math.inf), "warm_up": (0, math.inf)}
  program.check_ranges(options, **limits)
  if jax.device_count() < 2:
    raise InputError(
      f"{jax.device_count()} device; give at least 2 devices, see --help"
    )
  out = pathlib.Path(options.out)
  out.mkdir(parents=True, exist_ok=True)
  spans_of, table, first_s = {}, [], None
  for name in SCHEDULES:
    spans_of[name], step_s = measure(name, options.steps, options.warm_up)
    first_s, row = first_s or step_s, {"measured": name}
    row |= {"s/step": f"{step_s:.3g}", "speedup": f"{first_s / step_s:.2f}"}
    for side in ("learner", "sampler", "rewards"):
      share = busy(spans_of[name], side) / (step_s * options.steps)
      row[f"{side} busy"] = f"{share:.0%}"
    table.append(row)
    print(row, flush=True)
  (out / "table.md").write_text(report.markdown(table), encoding="utf-8")
  rows = [(name, *span) for name, spans in spans_of.items() for span in spans]
  write_csv(out / "timeline.csv", ("schedule", *Span._fields), rows)
  draw(spans_of, out / "timeline.png")
