"""Loads and compares the configs of the project's methods."""

import ast

from jaxrl_llm import config as config_lib

METHODS = sorted(config_lib.methods())


def load(name, preset=""):
  """Returns the config of `--config=configs/NAME.py[:PRESET]`."""
  return config_lib.based_on(name, preset)


def value(text):
  """Parses the value of a setting: a number, True, a tuple, or a word."""
  try:
    return ast.literal_eval(text)
  except ValueError:
    return text


def resolved(config):
  """Returns every key with its value, with references resolved."""
  config = config.copy_and_resolve_references()
  return {key: config_lib.get(config, key) for key in config_lib.KEYS}


def keys(config, prefix=""):
  """Yields every dotted key that has a value."""
  found = []
  for name, value in config.items():
    path = prefix + name
    group = any(key.startswith(f"{path}.") for key in config_lib.KEYS)
    found += keys(value, f"{path}.") if group else [path]
  return found


def differing(one: dict, other: dict) -> set[str]:
  """Returns the keys whose values differ; both must have the same keys."""
  assert one.keys() == other.keys()
  return {key for key in one if one[key] != other[key]}
