"""Validation of a config: each setting, then the constraints between them.

Each error is one line with the settings, their values and the allowed ones.
"""

import contextlib
import difflib
from typing import Any

import jax

from jaxrl_llm import config as config_lib
from jaxrl_llm.config import Settings, moved, zoo
from jaxrl_llm.config.schema import Range
from jaxrl_llm.errors import InputError, as_input_error, refuse
from jaxrl_llm.learner import core
from jaxrl_llm.trainer import constraints


def validate(config: Settings) -> None:
  """Checks every setting and the constraints between them.

  Raises:
    InputError: One line with the settings, their values and the allowed ones.
  """
  config_lib.check_config(config, "the run was given")
  for path, key in config_lib.KEYS.items():
    value = config_lib.get(config, path)
    if key.default is None and value is None:
      continue
    if key.allowed is None:
      if value is None and key.default != "":
        raise InputError(f"config.{path}=None: give a value of its type")
      continue
    for one in value if isinstance(value, tuple) else (value,):
      if one not in key.allowed:
        raise InputError(
          f"config.{path}={value!r} must be {key.allowed}{_meant(key, one)}"
        )
  if jax.config.jax_enable_x64:
    raise InputError(
      "jax_enable_x64 is set, by the environment or a plugin, but runs compute"
      " in at most 32 bits; remove it"
    )
  for wrong, keys, advice in constraints.rules(config, core.compose(config)):
    refuse(config, wrong, keys, advice)


def _meant(key: Any, value: Any) -> str:
  """Returns a hint at what a value that is not allowed was meant to be."""
  if isinstance(key.default, tuple) and "," in str(value):
    return "; several are written ('a', 'b')"
  if moved_to := moved.of_value(value, zoo.names()):
    return moved_to
  names = [] if isinstance(key.allowed, Range) else map(str, key.allowed)
  near = difflib.get_close_matches(str(value), names, 1, 0.8)
  return f"; did you mean {near[0]!r}?" if near else ""


def check_effect(config: Settings) -> None:
  """Checks that something reads the settings of methods and of a critic.

  For new runs: presets set up the critic for all methods, and earlier versions
  accepted such settings, so a resumed run may have them.

  Raises:
    InputError: An unread setting is neither the default nor the method's.
  """
  name, _, preset = config.run.method.partition(":")
  if name not in config_lib.methods():
    return
  usual, unread = config_lib.based_on(name, preset), {}
  # Variants of a study may share settings of a critic.
  critic = core.compose(config).critic or core.compose(usual).critic
  for key in config_lib.KEYS:
    group, _, rest = key.partition(".")
    method = rest.rpartition(".")[0]
    if group == "value" and not critic:
      unread[key] = f"{name} has no critic that would read it"
    elif group == "method" and method and method not in config.method.use:
      unread[key] = f"config.method.use has no {method!r} that would read it"
  for key, why in unread.items():
    value = config_lib.get(config, key)
    if value not in (config_lib.KEYS[key].default, config_lib.get(usual, key)):
      raise InputError(
        f"config.{key}={value!r}: {why}; leave it out, or choose a method that"
        " does"
      )


def own_settings(
  config: Settings, key: str, name: str
) -> contextlib.AbstractContextManager[None]:
  """Returns a context that turns a part's errors into InputErrors.

  Args:
    config: settings of the run.
    key: key of the settings that are passed to the part.
    name: name of the part.
  """
  what = f"config.{key}={dict(config_lib.get(config, key))}"
  advice = f"correct the settings of {name!r}"
  return as_input_error(what, advice, TypeError, ValueError)
