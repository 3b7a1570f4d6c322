"""Simulates rollouts and training to compare schedules on a given machine.

Runs the engine's scheduler and the worker of real runs, with programs that only
advance a clock. Prices are an argument; times are computed, never measured.
"""

from jaxrl_llm.tools.simulate.comparison import Comparison
from jaxrl_llm.tools.simulate.cost import CostModel, Plane, accelerator, fit
from jaxrl_llm.tools.simulate.engine import predict
from jaxrl_llm.tools.simulate.lengths import Requests, lognormal, resample
from jaxrl_llm.tools.simulate.runs import (
  asynchronous,
  pipelined,
  static_batches,
)

__all__ = [
  "Comparison",
  "CostModel",
  "Plane",
  "Requests",
  "accelerator",
  "asynchronous",
  "fit",
  "lognormal",
  "pipelined",
  "predict",
  "resample",
  "static_batches",
]
