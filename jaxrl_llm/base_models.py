"""The base models of the package; scripts/dev/pretraining.py makes them."""

import pathlib
from typing import Any

_ASSETS = pathlib.Path(__file__).parent / "assets"
BASE = _ASSETS / "chain_sum_base"
_BASE_OF = {"remainder": _ASSETS / "remainder_base"}  # By source; else BASE.


def model_path(config: Any) -> str:
  """Directory of the policy that a run starts from."""
  return config.model.path or str(_BASE_OF.get(config.data.source, BASE))
