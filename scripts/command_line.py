"""What is wrong with the command line of a program that takes --config."""

import difflib
import sys

from absl import flags
from ml_collections import config_flags

from jaxrl_llm import config as config_lib
from jaxrl_llm.errors import InputError


def define_config(default: str, help_text: str) -> flags.FlagHolder:
  """--config, whose default already takes every --config.KEY given."""
  try:
    return config_flags.DEFINE_config_file("config", default, help_text)
  except AttributeError as error:  # There is no such key.
    print(f"error: {explain(error, sys.argv)}", file=sys.stderr)
    sys.exit(2)


def explain(error: Exception, argv: list[str]) -> str:
  """One line for a command line that absl's flags refused with an error."""
  return _unknown_key(argv) or _reason(error)


def _unknown_key(argv: list[str]) -> str | None:
  """What is wrong with the first --config.KEY that no config has."""
  keys = list(config_lib.KEYS)
  for argument in argv[1:]:
    name, dot, key = argument.partition("=")[0].lstrip("-").partition(".")
    groups = [key, *(k for k in keys if k.startswith(key + "."))]
    if name != "config" or not dot or len(groups) > 1 or key in keys:
      continue
    if key in config_lib.RENAMED:
      new = config_lib.RENAMED[key]
      return f"--config.{key}: this key has a new name; use --config.{new}"
    if key in config_lib.REMOVED:
      return f"--config.{key}: this key is gone; {config_lib.REMOVED[key][1]}"
    parent = key.rpartition(".")[0]
    near = max(keys, key=lambda known: sum(_likeness(key, known)))
    group, name = _likeness(key, near)
    likely = group + name > 1.2 and name > 0.25
    hint = f"did you mean {near}?" if likely else "see --help_config"
    if parent.endswith("settings"):
      hint = f"give the whole, --config.{parent}=\"{{'NAME': VALUE}}\""
    return f"--config.{key}: no such key; {hint}"
  return None


def _likeness(key: str, known: str) -> tuple[float, float]:
  """How alike two keys are in their groups and in their names, 0 to 1."""
  parts = zip(key.rpartition(".")[::2], known.rpartition(".")[::2])
  ratio = lambda pair: difflib.SequenceMatcher(None, *pair).ratio()
  return tuple(map(ratio, parts))


def _reason(error: Exception) -> str:
  """One line of an error that may wrap others or a whole traceback."""
  causes = [error]
  while causes[-1].__context__:
    causes.append(causes[-1].__context__)
  for cause in reversed(causes):
    if isinstance(cause, InputError):
      return str(cause)
  lines = str(error).strip().splitlines() or [type(error).__name__]
  if isinstance(error, OSError):
    return f"--config: {lines[-1].strip()}; give a METHOD or a file"
  return lines[-1].strip()
