"""Metrics of a run: measuring, writing and display.

`MetricsLogger` fans one row a step out to `metrics.jsonl`, trackers and the
console. `Health` warns of what the rows show to go wrong. Needs no accelerator.
"""

from jaxrl_llm.metrics.console import printable
from jaxrl_llm.metrics.health import Health
from jaxrl_llm.metrics.logger import MetricsLogger, PhaseLogger
from jaxrl_llm.metrics.measure import (
  CompileCounter,
  PhaseTimer,
  mean_and_standard_error,
  pass_at_k,
  peak_memory_gib,
  watch_compilations,
)
from jaxrl_llm.metrics.samples import Sample, make_samples, sample_lines
from jaxrl_llm.metrics.trackers import check_trackers
from jaxrl_llm.metrics.writers import JsonlWriter, iterate_rows, read_rows

__all__ = (
  "CompileCounter",
  "Health",
  "JsonlWriter",
  "MetricsLogger",
  "PhaseLogger",
  "PhaseTimer",
  "Sample",
  "check_trackers",
  "iterate_rows",
  "make_samples",
  "mean_and_standard_error",
  "pass_at_k",
  "peak_memory_gib",
  "printable",
  "read_rows",
  "sample_lines",
  "watch_compilations",
)
