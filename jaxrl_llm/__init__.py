"""jaxrl_llm: functional RL for LLM reasoning in JAX.

`from jaxrl_llm import estimators, losses` gives pure functions that need only
JAX and chex; heavier modules are imported on first use. `train`, `load` and
`Policy` train, load and use a policy from Python.
"""

import importlib
from typing import Any

__version__ = "0.1.0"
_MODULES = ("config", "distributions", "estimators", "losses", "masked")
_MODULES += ("metrics", "models", "register")
_API = ("Policy", "load", "train")


def __getattr__(name: str) -> Any:
  """Imports a public module, or a name of `api`, on first use."""
  if name in _MODULES:
    return importlib.import_module(f"{__name__}.{name}")
  if name in _API:
    return getattr(importlib.import_module(f"{__name__}.api"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted(("__version__", *_MODULES, *_API))
