"""Checks of a config: every key on its own, then what fits together.

Each failure is one line that names the keys, their values and what is allowed.
"""

from typing import Any

from jaxrl_llm import config as config_lib
from jaxrl_llm.data import sources
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.choices import has_critic
from jaxrl_llm.train.constraints import constraints


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
  _validate_sizes(config)
  for is_broken, keys, why in constraints(config):
    if is_broken:
      named = [f"config.{key}={config_lib.get(config, key)!r}" for key in keys]
      raise InputError(f"{' with '.join(named)}: {why}")


def _validate_sizes(config: Any) -> None:
  batch = config_lib.batch_size(config)
  trained = ["policy"]
  if has_critic(config) and not config.schedule.window:
    trained.append("value")  # Windows end any number of responses.
  for role in trained:
    size = config.optimizer[role].mini_batch
    if batch % size:
      raise InputError(
        f"config.optimizer.{role}.mini_batch={size} must divide the batch of"
        f" {batch} = data.prompts_per_step * data.group_size"
      )
  slots = config.sampler.slots
  if slots and slots < max(config.data.group_size, config.eval.samples):
    raise InputError(
      f"config.sampler.slots={slots} must hold one group: data.group_size="
      f"{config.data.group_size}, eval.samples={config.eval.samples}"
    )
  data = config.data
  if sources.needs_path(data.source) and not data.path:
    raise InputError(
      f"config.data.source={data.source!r} needs config.data.path"
    )
  given = data.split != config_lib.KEYS["data.split"].default
  if given and "split" not in sources.reads(data.source):
    raise InputError(
      f"config.data.split={data.split!r}: source {data.source!r} has no splits;"
      " give the files of one by data.path, and those of another by eval.path"
    )
