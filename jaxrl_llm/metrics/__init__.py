"""Metrics of a run: measurement, logging and display.

`MetricsLogger` sends one row per step to `metrics.jsonl`, trackers and the
console. `Health` warns of problems that show in the rows. Needs no accelerator.
"""

from jaxrl_llm.metrics.console import printable as printable
from jaxrl_llm.metrics.health import RULES as RULES, Health as Health
from jaxrl_llm.metrics.logger import (
  MetricsLogger as MetricsLogger,
  PhaseLogger as PhaseLogger,
)
from jaxrl_llm.metrics.measure import (
  CompileCounter as CompileCounter,
  PhaseTimer as PhaseTimer,
  mean_and_standard_error as mean_and_standard_error,
  pass_at_k as pass_at_k,
  peak_memory_gib as peak_memory_gib,
  watch_compilations as watch_compilations,
)
from jaxrl_llm.metrics.results import (
  accuracy_names as accuracy_names,
  reached as reached,
)
from jaxrl_llm.metrics.samples import (
  Sample as Sample,
  make_samples as make_samples,
  sample_lines as sample_lines,
)
from jaxrl_llm.metrics.trackers import check_trackers as check_trackers
from jaxrl_llm.metrics.writers import (
  JsonlWriter as JsonlWriter,
  iterate_rows as iterate_rows,
  mend as mend,
  read_rows as read_rows,
)
