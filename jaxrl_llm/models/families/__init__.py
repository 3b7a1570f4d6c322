"""Model families, one file each.

`families/NAME.py` defines `FAMILY` for models whose `model_type` is NAME.
Adding the file is enough to support the family.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.models.rope import show


class Family(NamedTuple):
  """Describes how the `config.json` and the weights of a family are read."""

  architecture: str  # Class in transformers.
  # (config) -> layer kinds of a period, which repeats up to the last layer; its
  # length divides the number of layers. See `layers.DecoderKind`.
  period: Callable[[Any], tuple[Any, ...]]
  # Component of a parameter's path -> components of the tensor name, with {}
  # for the index of the layer. Components without an entry are the same in
  # both.
  names: Mapping[str, str]
  # (config) -> allowed values by key of config.json, None for an absent key.
  # Other values are rejected, because the model would compute something else.
  supported: Callable[[Any], Mapping[str, Sequence[Any]]]
  fixed: Mapping[str, bool] = {}  # Fields without a key in config.json.
  # Keys that may be missing or null (as in old Llama files); the format defines
  # defaults.
  optional: tuple[str, ...] = ()
  written: Mapping[str, Any] = {}  # Additional keys to write to config.json.
  # Numbers specific to this family, stored in `ModelConfig.extra`: key of
  # config.json -> smallest and largest accepted value.
  extra: Mapping[str, tuple[float, float]] = {}
  # (parsed config.json) -> the same values under Llama's keys.
  respelled: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
  # (values to write to config.json) -> the values as transformers reads them.
  spelled: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
  zero_centered_norms: bool = False  # Norms multiply by 1 + scale.
  # (config) -> factor of the token embeddings.
  embedding_scale: Callable[[Any], float] = lambda config: 1.0


REGISTERED: dict[str, Family] = {}  # Added by `register.family`.
_SHIPPED = [module.name for module in pkgutil.iter_modules(__path__)]


def names() -> list[str]:
  """Returns the names of all families."""
  return sorted({*_SHIPPED, *REGISTERED})


def get(name: Any) -> Family:
  """Returns a family by its name, which may come from an untrusted file.

  Raises:
    ValueError: There is no such family.
  """
  if name not in names():
    raise ValueError(
      f"model_type {show(name)} is not supported; use a model of type"
      f" {', '.join(names())}"
    )
  if name in REGISTERED:
    return REGISTERED[name]
  return importlib.import_module(f"{__name__}.{name}").FAMILY
