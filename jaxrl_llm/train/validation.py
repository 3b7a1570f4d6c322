"""Checks of a config: every key on its own, then what fits together.

Each failure is one line that names the keys, their values and what is allowed.
"""

from typing import Any

from jaxrl_llm import config as config_lib
from jaxrl_llm.errors import InputError
from jaxrl_llm.train import constraints


def validate(config: Any) -> None:
  """Checks every setting and their combinations.

  Raises:
    InputError: one line naming the key, its value and what is allowed.
  """
  for path, key in config_lib.KEYS.items():
    value = config_lib.get(config, path)
    if key.allowed is None or (key.default is None and value is None):
      continue
    for one in value if isinstance(value, tuple) else (value,):
      if one not in key.allowed:
        raise InputError(f"config.{path}={value!r} must be {key.allowed}")
  for keys, why in constraints.broken(config).items():
    named = " with ".join(
      f"config.{key}={config_lib.get(config, key)!r}"
      for key in keys.split(", ")
    )
    raise InputError(f"{named}: {why}")
