"""Writes the logs of runs as one self-contained HTML page.

The page is `assets/report/page.html` with the logs embedded as JSON; `page.js`
in the same directory draws the tables and the response viewer in the browser.
"""

import base64
import html
import json
import pathlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm import metrics
from jaxrl_llm.metrics import accuracy_names, reached
from jaxrl_llm.system import files
from jaxrl_llm.tools.report import time_spent
from jaxrl_llm.tools.report.runs import Run, flatten

_ASSETS = pathlib.Path(__file__).parents[2] / "assets" / "report"
_NO_METRICS = ("time", "nonfinite")  # Fields of a row.
# Metric -> column of the table of steps, after the columns of evaluations.
_COLUMNS = {
  "reward/mean": "reward",
  "reward/accuracy": "accuracy",
  "policy/entropy": "entropy",
  "rollout/response_length_mean": "mean length",
  "rollout/response_length_max": "longest",
  "policy/approx_kl": "KL of update",
  "value/explained_variance": "expl. variance",
  "sampler_trainer/logprob_diff_mean": "log-prob diff. (mean)",
  "sampler_trainer/logprob_diff_max": "log-prob diff. (max)",
  "time/step_s": "seconds",
}
# Fields of samples.jsonl that the viewer loads when a response is opened.
_PER_TOKEN = ("tokens", "origin", "advantage", "value", "logprob_diff")
_FIELDS = ("step", "prompt", "response", "gold", "extracted", "reward")
_FIELDS += ("length", "stop", "error", "correct", "parts", "example")
_FIELDS += ("group", "sample")
_BLOCK = 500  # Responses per element of per-token data, as in page.js.
_MOST_CHARACTERS = 300_000_000  # Per-token data that a browser can hold.


def write_page(
  runs: Sequence[Run],
  picture: pathlib.Path,
  path: pathlib.Path,
  *,
  defaults: Mapping[str, Any] = {},
) -> None:
  """Writes one self-contained HTML page.

  All logged data are embedded as JSON, so a response is text, never markup. If
  the per-token data are too large for a browser, those of the first responses
  are left out.

  Args:
    runs: one or more runs.
    picture: PNG file of their curves, to embed.
    path: HTML file to write.
    defaults: default settings; the page lists the settings that differ.

  Raises:
    InputError: A line of a samples.jsonl is damaged.
  """
  data, details = _data(runs)
  data["defaults"] = flatten(defaults)
  blocks = [
    _element(f"tokens{i // _BLOCK}", "\n".join(details[i : i + _BLOCK]))
    for i in range(0, len(details), _BLOCK)
  ]
  named = len(runs) > 1
  lines = [f"{x.name}: " * named + reached(x.rows) for x in runs]
  lines = [f'<p class="reached">{html.escape(line)}</p>' for line in lines]
  page = string.Template((_ASSETS / "page.html").read_text("utf-8")).substitute(
    title=html.escape(", ".join(run.title for run in runs)),
    reached="\n".join(lines),
    picture=base64.b64encode(picture.read_bytes()).decode(),
    data="\n".join([_element("data", _json(data)), *blocks]),
    script=(_ASSETS / "page.js").read_text("utf-8"),
  )
  with files.named(path):
    path.write_text(page, "utf-8", errors="backslashreplace")


def _data(runs: Sequence[Run]) -> tuple[dict[str, Any], list[str]]:
  """Returns the data for page.js, and the per-token data of each response."""
  prompts: dict[str, int] = {}  # A group shares its prompt.
  samples, details, size, left_out = [], [], 0, 0
  for index, run in enumerate(runs):
    for row in metrics.iterate_rows(run.samples) if run.samples else ():
      prompt = prompts.setdefault(row["prompt"], len(prompts))
      samples.append([index, *map((row | {"prompt": prompt}).get, _FIELDS)])
      detail = {name: row[name] for name in _PER_TOKEN if name in row}
      details.append(_json(detail) if "tokens" in detail else "")
      size += len(details[-1])
  for place, detail in enumerate(details):
    if size <= _MOST_CHARACTERS:
      break
    size, left_out, details[place] = size - len(detail), place + 1, ""
  evaluations = accuracy_names(row for run in runs for row in run.rows)
  columns = {x: x.removeprefix("eval/").replace("/", " ") for x in evaluations}
  data = {
    "runs": [_run(run) for run in runs],
    "columns": list((columns | _COLUMNS).items()),
    "meaning": time_spent.MEANING,
    "prompts": list(prompts),
    "fields": ["run", *_FIELDS],
    "samples": samples,
    "left_out": left_out,
  }
  return data, details


def _run(run: Run) -> dict[str, Any]:
  names = {name: None for row in run.rows for name in row}
  names = [name for name in names if name not in _NO_METRICS]
  spent = time_spent.seconds_spent(run.rows)
  return {
    "name": run.name,
    "names": names,
    "rows": [[row.get(name) for name in names] for row in run.rows],
    "settings": run.config,
    "seconds": spent | {"goodput": time_spent.goodput(run.rows)},
  }


def _json(value: Any) -> str:
  """Returns JSON without markup, which is safe in a script element."""
  return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _element(name: str, text: str) -> str:
  return f'<script type="application/json" id="{name}">\n{text}\n</script>'


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
  """Formats rows with the same keys as a Markdown table."""
  cells = [list(rows[0]), ["---"] * len(rows[0])]
  cells += [row.values() for row in rows]
  return "\n".join(f"| {' | '.join(row)} |" for row in cells)
