"""The directory of a training run: its settings and its policy.

`config.json` holds the settings of the first start and is never changed. Each
resume adds its changes as a line of `config_changes.jsonl`, {"step": step of
the checkpoint, "changes": {key: [old, new]}}; together they are the current
settings. `base_model/` has the configuration and tokenizer of the base model,
so that the directory is self-contained.

Only the run itself writes (`held`), and files are replaced atomically, so that
the directory of a running run can be read at any time.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jaxrl_llm import base_models, checkpoint, digest, files, metrics, models
from jaxrl_llm import config as config_lib
from jaxrl_llm.data import sources
from jaxrl_llm.data.rows import read_object
from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.models import hf

_CONFIG, _CHANGES = "config.json", "config_changes.jsonl"
_ROWS, _MODEL = "metrics.jsonl", "base_model"
_FILES = (_ROWS, "samples.jsonl")

Changes = dict[str, list[Any]]  # Key: [old, new], as JSON has them.
# Removed keys that a checkpoint of today's format may have been saved with, and
# the value that changes nothing.
_GONE = {"model.remat": True}


class Policy(NamedTuple):
  """A trained policy."""

  fns: models.ModelFns
  params: Any  # float32.
  step: int  # Iterations it was trained for.
  model_path: str  # Directory with its tokenizer.


def is_workdir(path: pathlib.Path) -> bool:
  """Whether a directory is that of a run and not of a model."""
  return (path / "checkpoints").is_dir()


def steps(workdir: pathlib.Path) -> list[int]:
  """Returns the steps of the complete checkpoints, ascending."""
  return checkpoint.steps(workdir / "checkpoints")


@contextlib.contextmanager
def held(workdir: pathlib.Path) -> Iterator[None]:
  """Creates the directory of a run and locks it against other processes.

  Raises:
    InputError: It cannot be written, or another process trains in it.
  """
  with _writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
    for place in (workdir / name for name in (*_FILES, "checkpoints")):
      if place.exists() and place.is_file() != (place.name in _FILES):
        raise OSError(f"{place.name} in it is of the wrong type")
    file = (workdir / "lock").open("a")
  with file:
    try:
      # The system releases the lock however the process ends. It also works
      # across machines if the file system supports locks, as NFS 4 does.
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise InputError(
        f"--workdir={workdir}: another process trains in it; stop that one or"
        " choose another directory"
      ) from None
    except OSError:
      print(f"{workdir}: cannot be locked; start no second run in it")
    yield


def prepare(workdir: pathlib.Path, config: Any) -> Changes:
  """Compares the settings of a run with the given ones.

  Writes nothing: a refused resume leaves the directory unchanged.

  Args:
    workdir: directory of the run.
    config: the new settings.

  Returns:
    The changes; empty without a checkpoint, where a run starts anew.

  Raises:
    InputError: Its settings cannot be read, or a change does not fit its
      checkpoints.
  """
  if not steps(workdir):
    return {}
  changes = differences(read_config(workdir), config)
  fixed = {config_lib.FIXED}
  if config.schedule.window or config.schedule.stop != "all":
    fixed.add(config_lib.IN_FLIGHT)
  if config.off_policy.keep_weights:
    fixed.add(config_lib.KEPT)
  if "split" not in sources.reads(config.data.source):
    fixed.add(config_lib.HELD_OUT)
  refused = {}
  for key, (old, new) in changes.items():
    resume = config_lib.KEYS[key].resume
    switched = resume == config_lib.SWITCH and bool(old) != bool(new)
    if resume in fixed or switched:
      refused[key] = [old, new]
  if refused:
    raise InputError(
      f"{workdir}: cannot change on resume: {'; '.join(describe(refused))};"
      " use the old values or another --workdir"
    )
  return changes


def differences(old: Any, new: Any) -> Changes:
  """Returns the keys in which two configs differ."""
  old, new = _flat(old.to_dict()), _flat(new.to_dict())
  return {k: [old[k], new[k]] for k in new if old[k] != new[k]}


def describe(changes: Changes) -> list[str]:
  """Returns a line for each change: `config.KEY: OLD -> NEW`."""
  return [f"config.{k}: {a!r} -> {b!r}" for k, (a, b) in changes.items()]


def begin(workdir: pathlib.Path, config: Any) -> bool:
  """Writes the settings of a new run, and the files of its base model.

  Returns:
    Whether a run with the same settings had begun in the directory.

  Raises:
    InputError: The directory cannot be written, or the model cannot be read.
  """
  file = workdir / _CONFIG
  text = json.dumps(config.to_dict(), indent=2, default=str) + "\n"
  with _writing(workdir):
    before = file.read_bytes() if file.exists() else b""
    # Left by a run whose checkpoints were removed.
    (workdir / _CHANGES).unlink(missing_ok=True)
    hf.copy_settings(base_models.model_path(config), workdir / _MODEL)
    files.tree_to_disk(workdir / _MODEL)
    files.write_whole(file, text)
  return before == text.encode()


def record(workdir: pathlib.Path, step: int, changes: Changes) -> None:
  """Records the changes of a resume, once it has succeeded.

  Args:
    workdir: directory of the run.
    step: step of the checkpoint that is resumed.
    changes: from `prepare`.

  Raises:
    InputError: The directory cannot be written.
  """
  if not changes:
    return
  file = workdir / _CHANGES
  with _writing(workdir):
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    line = json.dumps({"step": step, "changes": changes})
    files.write_whole(file, f"{before}{line}\n")


def facts(
  workdir: pathlib.Path, config: Any, inputs: Mapping[str, str]
) -> dict[str, Any]:
  """Returns facts about the run's other files, for `check_facts`.

  Args:
    workdir: directory of the run.
    config: config of the run.
    inputs: key of the config -> digest of the files that it names.
  """
  rows = (workdir / _ROWS).read_bytes()
  return {
    "config": _flat(config.to_dict()),
    "rows": {"bytes": len(rows), "checksum": digest.of_bytes(rows)},
    "inputs": dict(inputs),
  }


def check_facts(
  workdir: pathlib.Path,
  step: int,
  saved: Mapping[str, Any],
  inputs: Mapping[str, str],
) -> list[str]:
  """Compares a run's files with the facts stored in a checkpoint.

  Args:
    workdir: directory of the run.
    step: step of the checkpoint.
    saved: result of `facts` at that step.
    inputs: current inputs, as in `facts`.

  Returns:
    A line if rows are missing or changed, and one for each changed input.

  Raises:
    InputError: config.json has changed.
  """
  changed = {key for changes in _resumes(workdir) for key in changes}
  now = _flat(read_config(workdir).to_dict())
  wrong = {
    key: [value, now[key]]
    for key, value in saved["config"].items()
    if key in now and key not in changed and value != now[key]
  }
  if wrong:
    raise InputError(
      f"{workdir / _CONFIG}: it has changed since checkpoint {step} was saved:"
      f" {'; '.join(describe(wrong))}; restore the old values, and change"
      " settings by --config.KEY=VALUE"
    )
  before = saved.get("inputs", {})  # Earlier versions kept none.
  lines = [
    f"config.{key}: the files have changed since checkpoint {step} was saved;"
    " the run continues with the current ones"
    for key, value in inputs.items()
    if before.get(key, value) != value
  ]
  file, rows = workdir / _ROWS, saved["rows"]
  data = file.read_bytes() if file.exists() else b""
  if digest.of_bytes(data[: rows["bytes"]]) != rows["checksum"]:
    lines.append(
      f"{file}: rows before checkpoint {step} are missing or changed"
    )
  return lines


def set_aside(workdir: pathlib.Path, step: int) -> str:
  """Sets aside files that a resume from an earlier step would overwrite.

  Later checkpoints move to a folder `set_aside_N`; rows and settings are copied
  there. Rows after the last checkpoint are not kept: a resume repeats them.

  Args:
    workdir: directory of the run.
    step: step of the checkpoint that is resumed; -1 for a new start.

  Returns:
    A line about it; empty if nothing was set aside.
  """
  rows = workdir / _ROWS
  # Including incomplete ones, left by a kill.
  names = [place.name for place in (workdir / "checkpoints").glob("*")]
  late = sorted(
    int(n) for n in names if checkpoint.is_step(n) and int(n) > step
  )
  if not late and (step >= 0 or not rows.exists() or not rows.stat().st_size):
    return ""
  folder = workdir / f"set_aside_{1 + len(list(workdir.glob('set_aside_*')))}"
  with _writing(workdir):
    (folder / "checkpoints").mkdir(parents=True)
    for file in workdir.glob("*.json*"):
      shutil.copy2(file, folder)
    for name in map(str, late):
      os.replace(workdir / "checkpoints" / name, folder / "checkpoints" / name)
  what = f"checkpoints {', '.join(map(str, late))} and" if late else "the"
  return f"{what} rows of before are set aside in {folder}"


def new_times(workdir: pathlib.Path) -> pathlib.Path:
  """Makes the folder of each process's times of phases.

  Times of the previous start, perhaps on other hosts, move to `hosts_before`.
  """
  folder, before = workdir / "hosts", workdir / "hosts_before"
  with _writing(workdir):
    if folder.exists():
      shutil.rmtree(before, ignore_errors=True)
      os.replace(folder, before)
    folder.mkdir()
  return folder


def _writing(workdir: pathlib.Path) -> contextlib.AbstractContextManager[None]:
  """Turns errors of the file system into an InputError."""
  what = f"--workdir={workdir}: cannot be written"
  return as_input_error(what, "choose another directory", OSError)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns dotted keys with their values as in JSON."""

  def walk(group, prefix):
    for name, value in group.items():
      path = f"{prefix}{name}"
      # Some keys have a mapping as their value, such as data.settings.
      if isinstance(value, Mapping) and path not in config_lib.KEYS:
        yield from walk(value, f"{path}.")
      else:
        yield path, value

  return dict(walk(json.loads(json.dumps(config, default=str)), ""))


def read_config(workdir: pathlib.Path) -> Any:
  """Reads the current settings of a run, including changes by resumes.

  Settings missing in the files have their defaults.

  Raises:
    InputError: config.json is missing, or a file is damaged or has an unknown
      key.
  """
  file = workdir / _CONFIG
  config = config_lib.default_config()
  saved = read_object(file, "give the --workdir of a run")
  _update(config, _flat(saved), file)
  for changes in _resumes(workdir):
    changed = {key: value for key, (_, value) in changes.items()}
    _update(config, changed, workdir / _CHANGES)
  return config


def _resumes(workdir: pathlib.Path) -> list[Changes]:
  """Returns the changes of each resume."""
  file = workdir / _CHANGES
  rows = metrics.read_rows(file) if file.exists() else []
  resumes = [row.get("changes") for row in rows]
  for changes in resumes:
    if not isinstance(changes, dict) or not all(
      isinstance(pair, list) and len(pair) == 2 for pair in changes.values()
    ):
      raise InputError(
        f"{file}: 'changes' must map keys to [old, new]; restore the file"
      )
  return resumes


def _update(config: Any, saved: Mapping[str, Any], file: pathlib.Path) -> None:
  """Sets dotted keys."""
  for key, value in saved.items():
    if _GONE.get(key, ...) == value:
      continue
    if key not in config_lib.KEYS:
      raise InputError(f"{file}: key {key!r} is unknown; remove it")
    group, _, name = key.rpartition(".")
    value = tuple(value) if isinstance(value, list) else value
    what = f"{file}: key {key!r} cannot be {value!r}"
    with as_input_error(what, "correct it", TypeError, AttributeError):
      config_lib.get(config, group)[name] = value


def find_step(workdir: pathlib.Path, step: int | str | None = None) -> int:
  """Returns the newest complete checkpoint, or the given one.

  Args:
    workdir: directory of the run.
    step: its number, or 'best' for the run's checkpoint.best.

  Raises:
    InputError: It does not exist.
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
  """Returns the step with the highest value of a metric, the first of equals.

  Args:
    workdir: directory of the run.
    metric: name of the metric; '' is none.
    among: steps to choose from; None is all.
  """
  values = {
    row["step"]: row[metric]
    for row in (metrics.read_rows(workdir / _ROWS) if metric else ())
    if row.get(metric) is not None and (among is None or row["step"] in among)
  }
  return max(values, key=values.get, default=None)


def model_path(workdir: pathlib.Path) -> str:
  """Returns the directory with configuration and tokenizer of a run's model."""
  return str(workdir / _MODEL)


def restore_params(
  workdir: pathlib.Path, step: int, model: str, shapes: models.Params
) -> Any:
  """Reads the parameters of a checkpoint's model, without its optimizer.

  Args:
    workdir: directory of the run.
    step: which checkpoint.
    model: 'policy' or 'critic'.
    shapes: ShapeDtypeStructs with shardings.

  Returns:
    All parameters, a nested dict.

  Raises:
    InputError: The checkpoint is damaged or of another model.
  """
  folder = workdir / "checkpoints"
  base, trained = (f"learner.{model}.{name}" for name in models.Params._fields)
  found = checkpoint.load(folder / str(step), {trained: shapes.trained})
  if shapes.base:
    found |= checkpoint.load_base(folder, step, {base: shapes.base})
  return models.merge(models.Params(found.get(base, {}), found[trained]))


def load_policy(
  workdir: pathlib.Path, *, step: int | str | None = None
) -> Policy:
  """Loads the policy of a run onto the default device.

  Args:
    workdir: directory of the run.
    step: as in `find_step`.

  Raises:
    InputError: The run, its checkpoint or its model cannot be read.
  """
  step = find_step(workdir, step)
  path = model_path(workdir)
  fns = models.make_policy(hf.read_config(path))
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  init = jax.jit(fns.init, out_shardings=here)
  shapes = init.eval_shape(jax.random.key(0))
  frozen = read_config(workdir).optimizer.policy.frozen
  params = restore_params(
    workdir, step, "policy", models.partition(shapes, frozen)
  )
  return Policy(fns, params, step, path)
