"""The settings of a run.

`keys` and `training_keys` define every setting with its default, allowed values
and meaning. A method file `configs/METHOD.py` starts from a preset (`scaled`)
and sets the choices of the method; `--config.group.key=value` overrides both.
Unknown keys are errors. `trainer.validation` checks a config; `--help_config`
(`describe`) and docs/config.md are generated from the keys.
"""

import contextlib
import copy
import glob
import math
import os
import pathlib
import re
import runpy
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

# Importing keys, training_keys and zoo registers their settings, in this order.
from jaxrl_llm.config import (
  hints,
  keys as keys,
  presets,
  training_keys as training_keys,
  zoo as zoo,
)
from jaxrl_llm.config.schema import (
  FIXED as FIXED,
  HELD_OUT as HELD_OUT,
  IN_FLIGHT as IN_FLIGHT,
  KEYS as KEYS,
  NEW_PATH as NEW_PATH,
  PATH as PATH,
  SWITCH as SWITCH,
  NewPath as NewPath,
  Path as Path,
)
from jaxrl_llm.config.settings import Settings as Settings
from jaxrl_llm.errors import InputError, as_input_error, refuse
from jaxrl_llm.system import plugin


def default_config() -> ConfigDict:
  """Returns a locked config with the default of every key."""
  config = ConfigDict()
  for path, key in KEYS.items():
    *groups, name = path.split(".")
    group = config
    for part in groups:
      if part not in group:
        group[part] = ConfigDict()
      group = group[part]
    value = key.default
    if value is None:  # Accepts a number, too.
      value = config_dict.placeholder(float)
    if isinstance(value, dict):  # A single value, not a group of keys.
      value = ConfigDict(value, convert_dict=False)
    group[name] = value
  return config.lock()


def scaled(
  preset: str = "", *, groups: bool = False
) -> tuple[ConfigDict, presets.Scale]:
  """Returns the defaults with a preset applied, for a method file to override.

  Args:
    preset: '' (the built-in task on a CPU) or a name of `presets.SCALES`.
    groups: whether each prompt gets the preset's number of responses instead of
      one; a step has the same number of responses.

  Returns:
    The config, and the preset with sizes that only some methods need.

  Raises:
    InputError: The preset is unknown.
  """
  if preset not in presets.SCALES:
    names = ", ".join(repr(name) for name in presets.SCALES if name)
    raise InputError(f"preset {preset!r} is unknown; choose {names} or none")
  config, scale = default_config(), presets.SCALES[preset]
  scale.apply(config)
  if groups:
    config.data.group_size = scale.group_size
    config.data.prompts_per_step //= scale.group_size
  return config, scale


def grouped(preset: str = "") -> ConfigDict:
  """Returns a preset with groups and DAPO's token-level loss and clip-higher.

  The starting point of method files that change the selection of prompts or
  group-relative advantages. Argument and errors are those of `scaled`.
  """
  config, _ = scaled(preset, groups=True)
  config.estimator.name = "group"
  config.loss.mode = "token-mean"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  return config


def based_on(name: str, preset: str = "") -> ConfigDict:
  """Returns the config of a method, for a method file that modifies it.

  Args:
    name: one of `methods`, or the path of a file with a function `get_config`.
    preset: argument of `get_config`, '' for none.

  Raises:
    InputError: The method or the preset is unknown, or the file raises or
      returns no config.
  """
  files = methods()
  file = files.get(name, pathlib.Path(name))
  if not file.is_file():
    names = ", ".join(files)
    raise InputError(
      f"method {name!r} is unknown; give a file, FILE.py, or one of {names}"
    )
  ours = contextlib.nullcontext()
  with ours if name in files else plugin.user_code(name):
    read = runpy.run_path(str(file.resolve()))
    if "get_config" not in read:
      raise InputError("it has no function get_config(preset)")
    try:
      config = read["get_config"](*filter(None, [preset]))
    except (AttributeError, KeyError) as error:
      # Matches errors of a ConfigDict; other dicts give the name of a key only.
      said = r"""\W*(?:Key ")?(\w+)\W+($|n?Did you mean|does not exist)"""
      key = re.match(said, str(error))
      if key and (key[2] or isinstance(error, AttributeError)):
        name = f"{key[1]!r} is no key"
        raise InputError(f"{name}; {hints.hint(key[1])}") from error
      raise
    check_config(config, "get_config returned")
  return config


def check_config(config: Settings, what: str) -> None:
  """Raises InputError if a value is no config; `what` begins the message."""
  for key in KEYS:
    try:
      get(config, key)
    except (KeyError, TypeError, AttributeError):
      is_config = isinstance(config, ConfigDict)
      lacks = f"a config without {key}" if is_config else f"{config!r:.99}"
      raise InputError(
        f"{what} {lacks}; give a config made by jaxrl_llm.config.method, with"
        " single settings changed"
      ) from None


def methods() -> dict[str, pathlib.Path]:
  """Returns the method files of the package by name."""
  return {
    file.stem: file for file in sorted(hints.folder("configs").glob("*.py"))
  }


def method(name: str, preset: str = "", **settings: Any) -> ConfigDict:
  """Returns the config of a method, as `--config=NAME[:PRESET]` does.

  Args:
    name: one of `methods`, or the path of a method file.
    preset: scale, '' or a name of `presets.SCALES`.
    **settings: values of dotted keys, such as
      `**{"data.path": "train.jsonl"}`.

  Raises:
    InputError: A name, a key or the type of a value is wrong.

  Example:
    >>> config = method("grpo", "gsm8k", **{"run.steps": 100})
    >>> config.estimator.name, config.run.steps
    ('group', 100)
  """
  config = based_on(name, preset)
  config.run.method = pathlib.Path(name).stem + (preset and f":{preset}")
  update(config, settings)
  return config


def update(config: Settings, changes: Mapping[str, Any]) -> None:
  """Sets the values of dotted keys.

  Raises:
    InputError: A key does not exist, or a value has the wrong type.
  """
  for key, value in changes.items():
    if key not in KEYS:
      raise InputError(f"config.{key}: no such key; {hints.hint(key)}")
    group, _, last = key.rpartition(".")
    what = f"config.{key}={value!r}"
    with as_input_error(what, "give a value of the right type", TypeError):
      get(config, group)[last] = value


def get(config: Settings, key: str):
  """Returns the value at a dotted key."""
  for name in key.split("."):
    config = config[name]
  return config


def exclude(config: Settings, keys: Iterable[str], advice: str) -> None:
  """Refuses settings that do not have their default values.

  Args:
    config: settings of a run.
    keys: dotted keys.
    advice: the reason; {key} and {value} are the key and its default.

  Raises:
    InputError: One line with the settings and their values.
  """
  for key in keys:
    value = KEYS[key].default
    wrong = get(config, key) != value
    text = advice.format(key=key, value=value)
    refuse(config, wrong, key, text)


def with_absolute_paths(config: Settings) -> Any:
  """Returns a copy of a config whose paths are absolute, also in mappings.

  Relative paths are resolved against the current directory. A text that names
  nothing that exists is unchanged: it is a name, such as gsm8k, or an error.
  """
  config, values = copy.deepcopy(config), config.to_dict()
  for name, key in KEYS.items():
    if key.path:
      absolute = _absolute(get(values, name), key.path == NEW_PATH)
      update(config, {name: absolute})
  return config


def _absolute(value: Any, new: bool) -> Any:
  """Makes paths in a value absolute; `new` ones need not exist."""
  if isinstance(value, Mapping):
    return {name: _absolute(one, new) for name, one in value.items()}
  if isinstance(value, (tuple, list)):
    return type(value)(_absolute(one, new) for one in value)
  if not isinstance(value, str):
    return value
  if ".py:" in value:  # A function of a file.
    file, _, name = value.rpartition(":")
    return f"{_absolute(file, new)}:{name}"
  texts = [value] if os.path.exists(value) else value.split(",")
  return ",".join(
    os.path.abspath(x) if x and (new or _exists(x)) else x for x in texts
  )


def _exists(text: str) -> bool:
  """Returns whether a text is a path and not the name of something else."""
  # A folder may have the name of a dataset, but not one with a config.json.
  is_name = os.path.isdir(text) and os.sep not in text
  if is_name and not os.path.isfile(os.path.join(text, "config.json")):
    return False
  return os.path.exists(text) or bool(glob.glob(text))


def batch_size(config: Settings) -> int:
  """Returns the number of responses per step."""
  return config.data.prompts_per_step * config.data.group_size


def groups_in_flight(config: Settings) -> int:
  """Returns the number of groups that are sampled for a batch or a round."""
  schedule = config.schedule
  # Rounded: 10 * 1.1 is above 11 in floating point.
  return math.ceil(
    round(config.data.prompts_per_step * schedule.over_provision, 9)
  )


def replayed_groups(config: Settings) -> int:
  """Returns the number of earlier groups in a batch."""
  share = config.schedule.replay
  return int(round(config.data.prompts_per_step * share, 9))


def mini_batch(config: Settings, role: str) -> int:
  """Returns the responses per update of the 'policy' or 'value' model."""
  settings = config.optimizer[role]
  return settings.mini_batch or batch_size(config) // settings.updates_per_step


def max_tokens_per_row(config: Settings, more: int = 0) -> int:
  """Returns the tokens per packed row, at least the longest sample.

  Args:
    config: settings of a run.
    more: tokens that the critic's view adds to a prompt.
  """
  longest = config.data.max_prompt_length + config.sampler.max_response_length
  return max(config.optimizer.max_tokens_per_row, longest + more)


def most_staleness(config: Settings) -> int:
  """Returns the maximum number of updates between sampling and training."""
  schedule = config.schedule
  partial = schedule.stop != "all" and not schedule.window
  return schedule.lag + (schedule.max_staleness if partial else 0)


def describe(width: int = 80) -> str:
  """Returns all keys as text: default, allowed values and meaning."""
  lines = []
  for path, key in KEYS.items():
    allowed = f"; {key.allowed}" if key.allowed else ""
    lines += textwrap.wrap(
      f"{path} = {key.default!r}{allowed}", width, subsequent_indent="    "
    )
    indent = {"initial_indent": "    ", "subsequent_indent": "    "}
    lines += textwrap.wrap(key.meaning, width, **indent)
  return "\n".join(lines)
