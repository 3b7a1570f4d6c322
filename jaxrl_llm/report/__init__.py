"""Draws what runs wrote: one picture of their curves and one HTML page.

Reads `metrics.jsonl`, and `config.json` and `samples.jsonl` where they are.
Pictures and tables of other tools are in the same style: `figure`, `markdown`.
"""

from jaxrl_llm.report.time_spent import goodput, seconds_spent
from jaxrl_llm.report.page import markdown, write_page
from jaxrl_llm.report.picture import PANELS, draw
from jaxrl_llm.report.runs import Run, accuracy_names, load_run, reached

__all__ = (
  "PANELS",
  "Run",
  "accuracy_names",
  "draw",
  "goodput",
  "load_run",
  "markdown",
  "reached",
  "seconds_spent",
  "write_page",
)
