"""Schedules compared over tails of the length distribution."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxrl_llm.report import picture
from jaxrl_llm.simulate.compare import BASELINE
from jaxrl_llm.simulate.runs import Trace

_MARKERS = "osD^vPX"


class Line(NamedTuple):
  """A line of panels: the same lengths but for their tail."""

  title: str
  tails: Sequence[float]  # 99th percentile / median.
  traces: Sequence[Mapping[str, Trace]]  # Of each tail, without warm-up.


def draw(title: str, lines: Sequence[Line], path: pathlib.Path) -> None:
  """Draws throughput, use of slots and off-policy share against the tail.

  Args:
    title: of the picture.
    lines: of panels, from the top.
    path: PNG to write.

  Raises:
    ImportError: matplotlib is missing.
  """
  with picture.figure(len(lines), 3, extra=0.8) as (sheet, axes):
    for line, row in zip(lines, axes.reshape(-1, 3)):
      _draw_line(line, row)
    for axis in axes[-3:]:
      axis.set_xlabel("99th percentile / median of lengths")
    sheet.suptitle(title, x=0.01, ha="left", fontweight="bold")
    sheet.legend(
      *axes[0].get_legend_handles_labels(),
      loc="outside lower left",
      ncols=4,
      fontsize=9,
    )
    sheet.savefig(path)


def _draw_line(line: Line, axes) -> None:
  panels = {
    "trained responses/s, relative to static": lambda run, base: (
      run.responses_per_s / base.responses_per_s
    ),
    "share of slots that write": lambda run, base: run.utilisation,
    "share of off-policy tokens": lambda run, base: run.off_policy_share,
  }
  for axis, (label, value) in zip(axes, panels.items()):
    for number, name in enumerate(line.traces[0]):
      y = [value(runs[name], runs[BASELINE]) for runs in line.traces]
      # Schedules that agree lie on each other: markers of different size.
      size = 7 - 0.6 * number
      marker = _MARKERS[number % len(_MARKERS)]
      axis.plot(line.tails, y, marker=marker, markersize=size, label=name)
    axis.set_title(line.title)
    axis.set_ylabel(label)
    if max(line.tails) > 1:
      axis.set_xscale("log", base=2)
      axis.set_xticks(line.tails, [f"{tail:g}" for tail in line.tails])
      axis.minorticks_off()
  axes[0].set_ylim(bottom=0)
  for axis in axes[1:]:
    axis.set_ylim(-0.03, 1.03)
