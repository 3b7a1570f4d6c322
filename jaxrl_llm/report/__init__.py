"""Draws what runs wrote: one picture of their curves and one HTML page.

Reads `metrics.jsonl`, and `config.json` and `samples.jsonl` where they are.
"""

from jaxrl_llm.report.page import write_page
from jaxrl_llm.report.picture import PANELS, Panel, draw
from jaxrl_llm.report.runs import Run, load_run

__all__ = ("PANELS", "Panel", "Run", "draw", "load_run", "write_page")
