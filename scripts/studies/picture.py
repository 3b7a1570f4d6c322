"""Accuracy of every variant against steps, seconds and generated tokens."""

import pathlib
from collections.abc import Mapping, Sequence

from studies.results import Outcome

from jaxrl_llm.report.figure import draw_mean, figure, name_lines

_AXES = {
  "steps": ("Steps", 1.0),
  "seconds": ("Training time (minutes)", 60.0),
  "tokens": ("Generated tokens (millions)", 1e6),
  "decode_steps": ("Decode steps (thousands)", 1e3),
}


def draw(
  title: str, outcomes: Mapping[str, Sequence[Outcome]], path: pathlib.Path
) -> None:
  """Draws one panel an axis: mean over seeds, shaded by the standard error.

  Args:
    title: of the picture.
    outcomes: variant -> outcomes of its seeds.
    path: PNG to write.

  Raises:
    ImportError: matplotlib is missing.
  """
  runs = [run for results in outcomes.values() for run in results]
  # Those that every run has measured.
  kinds = [k for k in _AXES if all(getattr(r, k)[-1:].all() for r in runs)]
  with figure(path, 1, len(kinds), title=title, sharey=True) as (sheet, axes):
    for axis, kind in zip(axes, kinds):
      label, unit = _AXES[kind]
      for variant, results in outcomes.items():
        curves = [(getattr(r, kind) / unit, r.accuracy) for r in results]
        draw_mean(axis, curves, label=variant)
      axis.set_xlabel(label)
    axes[0].set_ylabel("Held-out sampled accuracy")
    name_lines(sheet, *axes[0].get_legend_handles_labels())
