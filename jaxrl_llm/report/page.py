"""Writes the logs of runs as one self-contained HTML page."""

import base64
import html
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm import metrics
from jaxrl_llm.report import time_spent
from jaxrl_llm.report.runs import Run

_NO_METRICS = ("time", "nonfinite")  # Fields of a row.
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 sans-serif; max-width: 1200px; margin: 2rem auto; }}
img {{ width: 100%; }} h2 {{ font-size: 1.15rem; }}
td, th {{ text-align: left; vertical-align: top; padding-right: 0.8rem; }}
td {{ font-family: monospace; white-space: pre-wrap; overflow-wrap: anywhere; }}
</style></head><body>
<h1>{title}</h1>
<img alt="Training curves" src="data:image/png;base64,{picture}">
{tables}
</body></html>
"""


def write_page(
  runs: Sequence[Run], picture: pathlib.Path, path: pathlib.Path
) -> None:
  """Writes one self-contained HTML page.

  Everything that a run wrote is escaped: a response is text, never markup.

  Args:
    runs: one or more runs.
    picture: PNG file of their curves, embedded.
    path: HTML file to write.
  """
  names = [run.name for run in runs]
  shown = lambda row: {k: row[k] for k in sorted(row) if k not in _NO_METRICS}
  last = _union([shown(run.rows[-1]) for run in runs])
  tables = [_table("Metrics of the last step", ["metric", *names], last)]
  spent = _union([time_spent.seconds_spent(run.rows) for run in runs])
  spent.append(["goodput", *(time_spent.goodput(run.rows) for run in runs)])
  tables.append(_table("Where the seconds went", ["", *names], spent))
  tables.append(f"<p>{html.escape(time_spent.MEANING)}</p>")
  for run in runs:
    if run.samples:
      head = list(run.samples[0])
      rows = [[sample.get(name) for name in head] for sample in run.samples]
      tables.append(_table(f"Samples of {run.name}", head, rows))
  settings = _union([run.config for run in runs])
  tables.append(_table("Settings", ["setting", *names], settings))
  page = _PAGE.format(
    title=html.escape(", ".join(run.title for run in runs)),
    picture=base64.b64encode(picture.read_bytes()).decode(),
    tables="\n".join(tables),
  )
  path.write_text(page, "utf-8", errors="backslashreplace")


def _union(columns: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
  """Returns rows of a key and its value in each column."""
  keys = dict.fromkeys(key for column in columns for key in column)
  return [[key, *(column.get(key) for column in columns)] for key in keys]


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence]) -> str:
  lines = ["".join(f"<th>{html.escape(name)}</th>" for name in head)]
  lines += ["".join(f"<td>{_cell(cell)}</td>" for cell in row) for row in rows]
  lines = "".join(f"<tr>{line}</tr>\n" for line in lines)
  return f"<h2>{html.escape(title)}</h2><table>{lines}</table>"


def _cell(value: Any) -> str:
  if value is None:
    return "&ndash;"
  text = f"{value:.5g}" if isinstance(value, float) else str(value)
  # Responses keep their line breaks; other control characters are shown.
  text = "\n".join(metrics.printable(line) for line in text.split("\n"))
  return html.escape(text)


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
  """Formats rows with the same keys as a Markdown table."""
  cells = [list(rows[0]), ["---"] * len(rows[0])]
  cells += [row.values() for row in rows]
  return "\n".join(f"| {' | '.join(row)} |" for row in cells)
