"""Schedules compared over tails of the length distribution."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxrl_llm.report.figure import figure, name_lines
from jaxrl_llm.simulate.compare import BASELINE
from jaxrl_llm.simulate.runs import Trace

_LABELS = (
  "trained responses/s, relative to static",
  "share of slots that write",
  "share of off-policy tokens",
)


class Line(NamedTuple):
  """A line of panels: the same lengths but for their tail."""

  title: str
  tails: Sequence[float]  # 99th percentile / median.
  traces: Sequence[Mapping[str, Trace]]  # Of each tail, without warm-up.

  def values(self, name: str) -> list[tuple[float, float, float]]:
    """Of a schedule: what the panels show, at each tail."""
    pairs = [(runs[name], runs[BASELINE]) for runs in self.traces]
    return [
      (
        run.responses_per_s / base.responses_per_s,
        run.utilisation,
        run.off_policy_share,
      )
      for run, base in pairs
    ]


def draw(title: str, lines: Sequence[Line], path: pathlib.Path) -> None:
  """Draws throughput, use of slots and off-policy share against the tail.

  Args:
    title: of the picture.
    lines: of panels, from the top.
    path: PNG to write.

  Raises:
    ImportError: matplotlib is missing.
  """
  with figure(path, len(lines), 3, title=title) as (sheet, axes):
    for line, row in zip(lines, axes.reshape(-1, 3)):
      for number, name in enumerate(line.traces[0]):
        # Schedules that agree lie on each other: markers of different size.
        style = {
          "marker": "osD^vPX"[number % 7],
          "markersize": 7 - 0.6 * number,
        }
        for axis, y in zip(row, zip(*line.values(name))):
          axis.plot(line.tails, y, label=name, **style)
      for axis, label in zip(row, _LABELS):
        axis.set(title=line.title, ylabel=label, ylim=(-0.03, None))
        axis.set_xlabel("99th percentile / median of lengths")
    name_lines(sheet, *axes[0].get_legend_handles_labels())
