"""Reports on runs: a picture of their curves and an HTML page.

Reads `metrics.jsonl`, and `config.json` and `samples.jsonl` where they exist.
Other tools use `figure` and `markdown` for pictures and tables of this style.
"""

from jaxrl_llm.tools.report.time_spent import goodput, seconds_spent
from jaxrl_llm.tools.report.page import markdown, write_page
from jaxrl_llm.tools.report.picture import PANELS, draw
from jaxrl_llm.tools.report.runs import Run, load_run

__all__ = (
  "PANELS",
  "Run",
  "draw",
  "goodput",
  "load_run",
  "markdown",
  "seconds_spent",
  "write_page",
)
