"""Studies: a table of settings x seeds, run, summed up and drawn."""

from jaxrl_llm.study.picture import draw
from jaxrl_llm.study.results import load_outcomes, write_curves, write_table
from jaxrl_llm.study.tables import STUDIES, Study, Variant

__all__ = [
  "STUDIES",
  "Study",
  "Variant",
  "draw",
  "load_outcomes",
  "write_curves",
  "write_table",
]
