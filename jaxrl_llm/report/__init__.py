"""Reports on runs: a picture of their curves and an HTML page.

Reads `metrics.jsonl`, and `config.json` and `samples.jsonl` where they exist.
Other tools use `figure` and `markdown` for pictures and tables of this style.
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
