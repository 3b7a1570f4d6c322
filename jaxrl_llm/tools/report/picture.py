"""Draws the curves of runs as one picture."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.metrics.results import accuracy_names, reached, series
from jaxrl_llm.tools.report.figure import draw_mean, figure, name_lines
from jaxrl_llm.tools.report.runs import (
  Run,
  have_a_mean,
)

_PHASES = 5  # Number of phases drawn, the longest ones.
# Panel -> its title, and metric -> label of its line.
PANELS = {
  "reward": ("Reward (mean)", {"reward/mean": "mean"}),
  # Plus all evaluations.
  "accuracy": ("Accuracy", {"reward/accuracy": "training batch"}),
  "entropy": ("Entropy (nats per token)", {"policy/entropy": "entropy"}),
  "length": (
    "Response length (tokens)",
    {
      "rollout/response_length_mean": "mean",
      "rollout/response_length_max": "longest",
    },
  ),
  "unfinished": (
    "Unfinished responses (fraction)",
    {
      "rollout/truncated_fraction": "continue in the next step",
      "rollout/overlong_fraction": "reached the maximum length",
    },
  ),
  "explained_variance": (
    "Explained variance of the value model",
    {"value/explained_variance": "explained variance"},
  ),
  "clipping": (
    "Clipped tokens (fraction)",
    {
      "policy/clip_fraction_high": "upper bound",
      "policy/clip_fraction_low": "lower bound",
    },
  ),
  "kl": ("KL of the update (nats per token)", {"policy/approx_kl": "KL"}),
  # Plus the phases of a step.
  "time": ("Time per step (seconds)", {"time/step_s": "total"}),
}
# Not drawn if always 0: the method then does not have the feature.
_OPTIONAL = PANELS["unfinished"][1] | PANELS["clipping"][1]


def draw(
  runs: Sequence[Run], path: pathlib.Path, *, panels: Sequence[str] = ()
) -> None:
  """Draws the curves of runs; several runs are overlaid.

  Colours distinguish the metrics of a single run, or several runs. Long curves
  are faint behind their running mean. Runs that differ only in their seeds also
  get a mean curve. The first and last evaluations are printed above the panels.
  Panels without data are left out, as are fractions that are always 0.

  Args:
    runs: one or more runs.
    path: PNG file to write.
    panels: keys of `PANELS`, in the order to draw; all of them if empty.

  Raises:
    InputError: A panel is unknown, or no panel has anything to show.
    ImportError: matplotlib is not installed.
  """
  rows = [row for run in runs for row in run.rows]
  logged = {
    name
    for row in rows
    for name, value in row.items()
    if (value if name in _OPTIONAL else value is not None)
  }
  shown = {}
  for name in panels or PANELS:
    if name not in PANELS:
      raise InputError(f"panel must be one of {', '.join(PANELS)}, got {name}")
    metrics = {k: x for k, x in _metrics(runs, name).items() if k in logged}
    if metrics:
      shown[name] = metrics
  if not shown:
    raise InputError("none of the panels' metrics was logged")
  columns = min(3, len(shown))
  lines = math.ceil(len(shown) / columns)
  title = f"{runs[0].title}\n{reached(runs[0].rows)}"
  if len(runs) > 1:
    title = "\n".join(f"{run.name}: {reached(run.rows)}" for run in runs)
  title = title.strip()
  with figure(path, lines, columns, title=title) as (sheet, axes):
    for axis, (name, metrics) in zip(axes, shown.items()):
      axis.set_title(PANELS[name][0])
      axis.set_xlabel("step")
      for index, (metric, label) in enumerate(metrics.items()):
        _draw_metric(axis, runs, metric, index, label)
      if name == "time":  # The first steps compile, and take far longer.
        axis.set_yscale("log")
      else:  # Down to 0, with a margin for a line at 0.
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, -0.03 * high), high)
      if len(metrics) > 1 or len(PANELS[name][1]) > 1:
        below = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.22)}
        axis.legend(**below, ncols=3 if name == "time" else 2)
    for axis in axes[len(shown) :]:
      axis.axis("off")
    if len(runs) > 1:
      _name_runs(sheet, runs)


def _metrics(runs: Sequence[Run], panel: str) -> dict[str, str]:
  """Returns the metrics of a panel -> the labels of their lines."""
  rows = [row for run in runs for row in run.rows]
  more = {}
  if panel == "accuracy":
    names = accuracy_names(rows)
    more = {x: x.removeprefix("eval/").replace("/", " ") for x in names}
  elif panel == "time" and len(runs) == 1:
    phases = {name for row in rows for name in row if name[:5] == "time/"}
    phases -= {"time/step_s", "time/start_s"}
    seconds = {name: series(runs[0].rows, name)[1].sum() for name in phases}
    longest = sorted(phases, key=lambda name: (-seconds[name], name))[:_PHASES]
    more = {x: x[5:].removesuffix("_s").replace("_", " ") for x in longest}
  return PANELS[panel][1] | more


def _draw_metric(
  axis: Any, runs: Sequence[Run], metric: str, index: int, label: str
) -> None:
  """Draws a metric of a panel, distinguished by dashes or markers."""
  several = len(runs) > 1
  sparse = metric.startswith(("eval/", "time/evaluate"))  # Not in every step.
  style = {"linestyle": "--" if several and index else "-"}
  if sparse:
    marker = "osD^v"[index % 5]
    style = {"linestyle": "", "marker": marker, "markersize": 4}
  for number, run in enumerate(runs):
    style["color"] = f"C{number if several else index}"
    steps, values = series(run.rows, metric)
    if sparse:
      errors = dict(zip(*series(run.rows, f"{metric}_se")))
      errors = [errors.get(step, 0.0) for step in steps]
      axis.errorbar(steps, values, errors, capsize=2.5, **style)
    else:
      axis.plot(steps, values, alpha=0.25, linewidth=1, **style)
      width = 1 if several else 1.8
      axis.plot(steps, _smooth(values), linewidth=width, **style)
  if several:
    style["color"] = "black"
  if have_a_mean(runs) and not sparse:
    curves = [series(run.rows, metric) for run in runs]
    curves = [(steps, _smooth(values)) for steps, values in curves]
    draw_mean(axis, curves, **style)
  axis.plot([], [], label=label, **style)


def _name_runs(sheet: Any, runs: Sequence[Run]) -> None:
  from matplotlib.lines import Line2D

  colors = [f"C{number}" for number in range(len(runs))]
  names = [run.title for run in runs]
  if have_a_mean(runs):
    colors, names = [*colors, "black"], [*names, f"mean of {len(runs)} runs"]
  lines = [Line2D([], [], color=color) for color in colors]
  name_lines(sheet, lines, names)


def _smooth(values: np.ndarray) -> np.ndarray:
  """Returns a centred running mean of a curve, over a 50th of its points.

  At the ends, it averages the available points.
  """
  width = values.size // 50
  if width < 4:
    return values
  kernel = np.ones(width)
  sums = np.convolve(values, kernel, mode="same")
  return sums / np.convolve(np.ones_like(values), kernel, mode="same")
