"""Style of figures, and mean curves of several runs."""

import contextlib
import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.system import files

# Colours that colour-blind readers can tell apart (Okabe and Ito 2008), C0 to
# C6 in matplotlib; lines of the same colour differ in their dashes.
_COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000".split()
_DASHES = ("-", (0, (3, 1.5)), (0, (1, 1.2)))
_STYLE = {
  "figure.dpi": 130,
  "font.size": 9,
  "axes.titlesize": 10.5,
  "axes.titlelocation": "left",
  "axes.edgecolor": "#999999",
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "grid.color": "#e6e6e6",
  "legend.edgecolor": "none",
  "legend.fontsize": 8,
}
_CHARACTERS = 12  # Characters of a title or legend per inch.
_POINTS = 200
_NAMES = 4  # Maximum number of names in a line of the legend.

Curve = tuple[np.ndarray, np.ndarray]  # x, y.


@contextlib.contextmanager
def figure(
  path: pathlib.Path, lines: int, columns: int, *, title: str = ""
) -> Iterator[tuple[Any, Any]]:
  """Makes a figure of panels in the project's style and saves it on exit.

  Args:
    path: PNG file to write.
    lines: number of rows of panels.
    columns: number of columns of panels.
    title: title above all panels.

  Yields:
    (figure, its axes in reading order).

  Raises:
    ImportError: matplotlib is not installed.
  """
  # Imported here: only this function needs it. Without pyplot, a figure never
  # looks for a window system.
  import matplotlib
  from matplotlib.figure import Figure

  cycler = matplotlib.cycler
  cycle = cycler(linestyle=_DASHES) * cycler(color=_COLORS)
  with matplotlib.rc_context(_STYLE | {"axes.prop_cycle": cycle}):
    size = (max(4.3 * columns, 6.0), 2.9 * lines + 0.3)
    sheet = Figure(figsize=size, layout="constrained")
    sheet.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    axes = sheet.subplots(lines, columns, squeeze=False)
    yield sheet, axes.flatten()
    width = int(_CHARACTERS * size[0])
    title = "\n".join(textwrap.fill(x, width) for x in title.splitlines())
    sheet.suptitle(title, x=0.01, ha="left", fontweight="bold")
    with files.named(path):
      sheet.savefig(path)


def name_lines(sheet: Any, lines: Sequence[Any], names: Sequence[str]) -> None:
  """Adds one legend for all panels below them."""
  width = sheet.get_figwidth() * _CHARACTERS
  columns = max(1, min(_NAMES, int(width / max(len(x) + 5 for x in names))))
  rows = -(-len(names) // columns)
  sheet.set_figheight(sheet.get_figheight() + 0.1 + 0.2 * rows)
  sheet.legend(lines, names, loc="outside lower left", ncols=columns)


def draw_mean(axis: Any, curves: Sequence[Curve], **style: Any) -> None:
  """Draws the mean of curves, shaded by its standard error."""
  x, mean, error = band(curves)
  (line,) = axis.plot(x, mean, **style)
  shade = {"color": line.get_color(), "alpha": 0.15, "linewidth": 0}
  axis.fill_between(x, mean - error, mean + error, **shade)


def band(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns x, mean and standard error of curves, up to where one ends.

  Curves need not have the same x: seeds are evaluated at the same steps but not
  at the same seconds or tokens. Curves are interpolated linearly between their
  points, and are constant before the first, because nothing is learned until
  then. Empty curves are left out.
  """
  curves = [curve for curve in curves if curve[0].size]
  if not curves:
    return np.zeros(0), np.zeros(0), np.zeros(0)
  first, last = (min(x[end] for x, _ in curves) for end in (0, -1))
  x = np.linspace(first, last, _POINTS)
  values = np.stack([np.interp(x, *curve) for curve in curves])
  error = np.zeros(_POINTS)
  if len(curves) > 1:
    error = values.std(axis=0, ddof=1) / np.sqrt(len(curves))
  return x, values.mean(axis=0), error
