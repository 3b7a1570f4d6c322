"""Families of models, a file each.

`families/NAME.py` holds `FAMILY`, for models whose `model_type` is NAME. No
other file names it.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Family(NamedTuple):
  """Describes what a `config.json` means, and what it leaves out."""

  architecture: str  # Class of transformers.
  # (config) -> kinds of the first layers, which repeat up to the last layer;
  # their number divides that of the layers. See `layers.DecoderKind`.
  period: Callable[[Any], tuple[Any, ...]]
  # Word of a parameter's path -> words of its name in files, a period between
  # them; the layer's index stands for {}. Other words are the same there.
  names: Mapping[str, str]
  # (config) -> allowed values by key of config.json, None for an absent key.
  # Other values are refused: the model would load but compute something else.
  supported: Callable[[Any], Mapping[str, tuple[Any, ...]]]
  fixed: Mapping[str, bool] = {}  # Fields that are no keys of config.json.
  # Old Llama files leave these out; what they then mean is part of the format.
  optional: tuple[str, ...] = ()


REGISTERED: dict[str, Family] = {}  # By `register.family`.


def names() -> list[str]:
  """Returns the names of all families."""
  files = (module.name for module in pkgutil.iter_modules(__path__))
  return sorted({*files, *REGISTERED})


@functools.cache
def get(name: str) -> Family:
  """Returns the family of a name, one of `names`."""
  if name in REGISTERED:
    return REGISTERED[name]
  return importlib.import_module(f"{__name__}.{name}").FAMILY
