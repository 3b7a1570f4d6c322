"""Samples and judges responses: what a training loop is built from.

The names below are imported on first use: processes of environments import
`rollout.environments` alone, without JAX.
"""

import importlib
from typing import Any

_MODULES = {
  "Pipeline": "pipeline",
  "ResponseWriter": "writer",
  "RolloutEngine": "engine",
  "RolloutSettings": "schedule",
  "RolloutState": "records",
  "RolloutWorker": "worker",
  "Weights": "writer",
  "run_key": "worker",
}
__all__ = tuple(_MODULES)


def __getattr__(name: str) -> Any:
  if name not in _MODULES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
  return getattr(module, name)
