"""Reads the directory of a training run: its settings and its policy.

`config.json` holds the settings of the first start and is never changed. Each
resume adds its changes as a line of `config_changes.jsonl`, {"step": step of
the checkpoint, "changes": {key: [old, new]}}; together they are the current
settings. `base_model/` has the configuration and tokenizer of the base model,
so that the directory is self-contained.

This module only reads; the run writes (`trainer.workdir`). It replaces files
atomically, so that the directory can be read at any time during the run.
"""

import contextlib
import json
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jaxrl_llm import checkpoint, metrics, models
from jaxrl_llm import config as config_lib
from jaxrl_llm.data.rows import read_object
from jaxrl_llm.errors import InputError, as_input_error, located
from jaxrl_llm.learner import core
from jaxrl_llm.models.files import hf

CONFIG, CHANGES = "config.json", "config_changes.jsonl"
ROWS, MODEL = "metrics.jsonl", "base_model"

Changes = dict[str, list[Any]]  # Key -> [old, new], as JSON values.


def is_workdir(path: pathlib.Path) -> bool:
  """Returns whether a directory belongs to a run and not to a model."""
  return (path / "checkpoints").is_dir()


def steps(workdir: pathlib.Path) -> list[int]:
  """Returns the steps of the complete checkpoints, ascending."""
  return checkpoint.steps(workdir / "checkpoints")


def differences(old: Any, new: Any) -> Changes:
  """Returns the keys in which two configs differ."""
  old, new = flat(old.to_dict()), flat(new.to_dict())
  return {k: [old[k], new[k]] for k in new if old[k] != new[k]}


def describe(changes: Changes) -> list[str]:
  """Returns a line for each change: `config.KEY: OLD -> NEW`."""
  return [f"config.{k}: {a!r} -> {b!r}" for k, (a, b) in changes.items()]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns dotted keys, below a prefix, with their JSON values."""
  values = {}
  for name, value in config.items():
    key = f"{prefix}{name}"
    # Some keys have a mapping as their value, such as data.settings.
    if isinstance(value, Mapping) and key not in config_lib.KEYS:
      values |= flat(value, f"{key}.")
    else:
      values[key] = json.loads(json.dumps(value, default=str))
  return values


def read_config(workdir: pathlib.Path) -> Any:
  """Reads the current settings of a run, including changes by resumes.

  Settings missing in the files have their defaults. If a file is damaged, the
  settings are those of the newest checkpoint.

  Raises:
    InputError: config.json is missing, or a file is damaged or has an unknown
      key, and there is no checkpoint.
  """
  settings, changes, _ = read_settings(workdir)
  for row in changes:
    settings |= {key: value for key, (_, value) in row["changes"].items()}
  return to_config(settings, workdir / CHANGES)


def to_config(settings: Mapping[str, Any], file: Any = "settings") -> Any:
  """Makes a config from the result of `flat`; errors name the file."""
  config = config_lib.default_config()
  changes = {
    key: tuple(value) if isinstance(value, list) else value
    for key, value in settings.items()
  }
  with located(str(file)):
    config_lib.update(config, changes)
  return config


def read_settings(
  workdir: pathlib.Path,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
  """Returns the first settings of a run, its changes, and damaged files.

  The contents of a damaged file come from the newest checkpoint.

  Raises:
    InputError: As in `read_config`.
  """
  saved = facts(workdir)
  known = saved.get("changes")  # None without a checkpoint.
  first = dict(saved.get("config", {}))
  for row in reversed(known or []):
    first |= {key: value for key, (value, _) in row["changes"].items()}
  found, damaged = [], []
  kinds = (CONFIG, _first_settings, first), (CHANGES, _changes, known)
  for name, read, lost in kinds:
    try:
      found.append(read(workdir / name, known or []))
    except InputError:
      if known is None:
        raise
      found.append(lost)
      damaged.append(name)
  return *found, damaged


def facts(workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the facts about a run's files in its newest checkpoint."""
  for step in reversed(steps(workdir)):
    with contextlib.suppress(InputError):
      folder = workdir / "checkpoints" / str(step)
      return checkpoint.read(folder, "facts")["facts"]
  return {}


def _first_settings(file: pathlib.Path, _) -> dict[str, Any]:
  saved = flat(read_object(file, "give the --workdir of a run"))
  to_config(saved, file)
  return saved


def _changes(file: pathlib.Path, known: Sequence) -> list[dict[str, Any]]:
  """Reads {"step": step, "changes": {key: [old, new]}} of each resume."""
  kinds = OSError, KeyError, TypeError, ValueError, AttributeError
  what = f"{file}: 'changes' must map keys to [old, new]"
  with as_input_error(what, "restore the file", *kinds):
    rows = metrics.read_rows(file) if file.exists() else []
    for row in rows:
      for _old, _new in row["changes"].values():
        pass
  if rows[: len(known)] != known:
    raise InputError(f"{file}: it lacks changes; restore the file")
  return rows


def find_step(workdir: pathlib.Path, step: int | str | None = None) -> int:
  """Returns the newest complete checkpoint, or the given one.

  Args:
    workdir: directory of the run.
    step: its number, or 'best' for the run's checkpoint.best.

  Raises:
    InputError: The checkpoint does not exist.
  """
  folder, found = workdir / "checkpoints", steps(workdir)
  if not found:
    raise InputError(
      f"{folder}: no checkpoint; give the --workdir of a run that has saved"
    )
  if step is None:
    return found[-1]
  named = {str(number): number for number in found}
  if step == "best":  # Requires checkpoint.best.
    best = read_config(workdir).checkpoint.best
    named["best"] = best_step(workdir, best, found)
  if named.get(str(step)) is None:
    raise InputError(
      f"{folder}: no step {step}; choose from {', '.join(map(str, found))}"
    )
  return named[str(step)]


def best_step(
  workdir: pathlib.Path, metric: str, among: Collection[int] | None = None
) -> int | None:
  """Returns the step with the highest value of a metric, the first if tied.

  Args:
    workdir: directory of the run.
    metric: name of the metric; '' for none.
    among: steps to choose from; None for all.
  """
  file = workdir / ROWS
  values = {
    row["step"]: row[metric]
    for row in (metrics.read_rows(file) if metric and file.exists() else ())
    if row.get(metric) is not None and (among is None or row["step"] in among)
  }
  return max(values, key=values.get, default=None)


def model_path(workdir: pathlib.Path) -> str:
  """Returns the directory with configuration and tokenizer of a run's model."""
  return str(workdir / MODEL)


def restore_params(
  workdir: pathlib.Path, step: int, model: str, shapes: models.Params
) -> Any:
  """Reads the parameters of a checkpoint's model, without its optimizer.

  Args:
    workdir: directory of the run.
    step: step of the checkpoint.
    model: 'policy' or 'critic'.
    shapes: ShapeDtypeStructs with shardings.

  Returns:
    All parameters, a nested dict.

  Raises:
    InputError: The checkpoint is damaged or from another model.
  """
  folder = workdir / "checkpoints"
  config = read_config(workdir)
  # A critic with adapters shares the base of a policy with adapters.
  adapted = config.model.lora_rank and config.value.lora_rank
  base = f"learner.{'policy' if adapted else model}.base"
  trained = f"learner.{model}.trained"
  found = checkpoint.load(folder / str(step), {trained: shapes.trained})
  if shapes.base:
    found |= checkpoint.load_base(folder, {base: shapes.base})
  return models.merge(models.Params(found.get(base, {}), found[trained]))


def load_params(
  workdir: pathlib.Path, step: int
) -> tuple[models.ModelConfig, Any]:
  """Loads the policy's parameters of a checkpoint onto the default device.

  Returns:
    The model's configuration, with its adapters if any, and all parameters.

  Raises:
    InputError: The checkpoint or the model's configuration cannot be read.
  """
  config = read_config(workdir)
  model = models.adapted(config, hf.read_config(model_path(workdir)))
  shapes = _shapes_of(models.make_policy(model))
  shapes = models.partition(shapes, config.optimizer.policy.frozen)
  return model, restore_params(workdir, step, "policy", shapes)


def load_critic(
  workdir: pathlib.Path, step: int
) -> tuple[models.ValueFns, Any]:
  """Loads the critic's parameters of a checkpoint onto the default device.

  Returns:
    The critic's functions without adapters, and all parameters, into which
    adapters are merged.

  Raises:
    InputError: The checkpoint cannot be read or has no critic, or the critic is
      not a single model with a head.
  """
  config = read_config(workdir)
  if not any((workdir / "checkpoints" / str(step)).glob("learner.critic.*")):
    raise InputError(f"{workdir}: has no critic; give a run with one")
  critic = core.compose(config).critic
  cannot = {
    "is several models": critic.wrap_fns,
    "has value.reads_logprobs": config.value.reads_logprobs,
  }
  for what, has in cannot.items():
    if has:
      raise InputError(
        f"{workdir}: its critic {what}, which a model directory cannot hold;"
        " choose a run without it"
      )
  model = models.critic_config(config, hf.read_config(model_path(workdir)))
  shapes = _shapes_of(models.make_value(model, head=critic.head))
  shapes = models.partition(shapes, config.optimizer.value.frozen)
  params = restore_params(workdir, step, "critic", shapes)
  if model.adapters is not None:
    params = model.adapters.merge(params)
  return models.make_value(model.base, head=critic.head), params


def _shapes_of(fns: models.ModelFns | models.ValueFns) -> Any:
  """Returns ShapeDtypeStructs of all parameters, on the default device."""
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  init = jax.jit(fns.init, out_shardings=here)
  return init.eval_shape(jax.random.key(0))
