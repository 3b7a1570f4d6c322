"""Plots accuracy of variants against cost, and leads over the baseline."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from studies.results import Outcome, leads
from studies.tables import Study

from jaxrl_llm import metrics
from jaxrl_llm.tools.report.figure import draw_mean, figure, name_lines

_AXES = {
  "steps": ("Steps", 1.0),
  "seconds": ("Training time (minutes)", 60.0),
  "tokens": ("Generated tokens (thousands)", 1e3),
  "decode_steps": ("Decode steps (thousands)", 1e3),
}
# Format string (colour and marker), and vertical offset.
_LEADS = {"steps": ("C0o", -0.15), "tokens": ("C1s", 0.15)}


def draw(
  study: Study, outcomes: Mapping[str, Sequence[Outcome]], path: pathlib.Path
) -> None:
  """Plots a panel for each of the study's axes, and one of leads.

  Curves are means over seeds, shaded by the standard error; leads are over the
  study's first variant, as in the table, with standard errors.

  Args:
    study: the study, with its axes and the variants whose curves are plotted.
    outcomes: variant -> outcomes of its seeds.
    path: PNG file to write.

  Raises:
    ImportError: matplotlib is missing.
  """
  drawn = [name for name in outcomes if name in study.drawn] or outcomes
  panels = len(study.axes) + 1
  columns = min(panels, 2)  # More would be too small on a page.
  size = panels // columns, columns
  with figure(path, *size, title=study.title) as (sheet, axes):
    for axis, kind in zip(axes, study.axes):
      label, unit = _AXES[kind]
      for name in drawn:
        curves = [(getattr(r, kind) / unit, r.accuracy) for r in outcomes[name]]
        draw_mean(axis, curves, label=name)
      axis.set_xlabel(label)
      axis.set_ylabel("Held-out sampled accuracy")
      axis.sharey(axes[0])
    _draw_leads(axes[-1], study, outcomes)
    if study.axes:
      name_lines(sheet, *axes[0].get_legend_handles_labels())


def _draw_leads(axis, study: Study, outcomes) -> None:
  """Plots one row for each variant except the baseline, from the top."""
  names = [name for name in outcomes if name != study.baseline]
  base = outcomes.get(study.baseline, [])
  for kind in study.leads:
    marker, offset = _LEADS[kind]
    found = [leads(outcomes[name], base, kind) for name in names]
    rows = [
      (place + offset, *metrics.mean_and_standard_error(values))
      for place, values in enumerate(found)
      if values
    ]
    if rows:
      places, means, errors = np.transpose(rows)
      axis.errorbar(
        means,
        places,
        xerr=np.nan_to_num(errors),  # NaN for a single seed.
        fmt=marker,
        markersize=4,
        label=f"at equal {kind}",
      )
      axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
  axis.axvline(0, color="#999999", linewidth=1)
  axis.set_yticks(range(len(names)), names)
  axis.set_ylim(len(names) - 0.4, -0.6)
  axis.locator_params(axis="x", nbins=5)
  axis.set_xlabel(f"Lead over {study.baseline}")
