"""The base models of the package, trained by scripts/dev/pretraining.py."""

import pathlib
from typing import Any

_ASSETS = pathlib.Path(__file__).parent / "assets"
BASE = _ASSETS / "chain_sum_base"
_BASE_OF = {"remainder": _ASSETS / "remainder_base"}  # Other sources: BASE.


def model_path(config: Any) -> str:
  """Returns the directory of the model that a run starts from."""
  return config.model.path or str(_BASE_OF.get(config.data.source, BASE))
