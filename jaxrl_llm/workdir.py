"""The directory of a training run: its settings and its policy.

`config.json` holds the settings of the first start and is never written again.
What a resume changed is a line of `config_changes.jsonl`, {"step": where it
went on, "changes": {key: [old, new]}}; both together are the settings of now.
`base_model/` has the configuration and tokenizer of the model that it started
from, so that the folder stands alone.

Only the run itself writes (`held`), and a file is whole or not there, so that a
run which is still going on can be read at any moment.
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

from jaxrl_llm import (
  base_models,
  checkpoint,
  digest,
  files,
  metrics,
  models,
)
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
  """Whether a directory is that of a run, not that of a model."""
  return (path / "checkpoints").is_dir()


def steps(workdir: pathlib.Path) -> list[int]:
  """The steps of the complete checkpoints, ascending."""
  return checkpoint.steps(workdir / "checkpoints")


@contextlib.contextmanager
def held(workdir: pathlib.Path) -> Iterator[None]:
  """Makes the folder of a run and keeps other processes out of it meanwhile.

  Raises:
    InputError: the folder cannot be written, or a process trains in it.
  """
  with _writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
    for place in (workdir / name for name in (*_FILES, "checkpoints")):
      if place.exists() and place.is_file() != (place.name in _FILES):
        raise OSError(f"{place.name} in it is not of its kind")
    file = (workdir / "lock").open("a")
  with file:
    try:
      # The system drops the lock when the process ends, however it ends. It
      # counts between machines too if the file system passes locks on, as NFS
      # does from version 4 on.
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise InputError(
        f"--workdir={workdir}: another process trains in it; stop that one or"
        " choose another directory"
      ) from None
    except OSError:
      print(f"{workdir}: no locks here; start no second run in this folder")
    yield


def prepare(workdir: pathlib.Path, config: Any) -> Changes:
  """Compares the settings of a run with the given ones.

  Writes nothing into the folder: a resume that is refused leaves it as it is.

  Args:
    workdir: of the run.
    config: that it is to start or to go on with.

  Returns:
    What is to change; empty without a checkpoint, where a run starts anew.

  Raises:
    InputError: its settings cannot be read, or its checkpoints do not bear a
      change.
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
      f"{workdir}: its checkpoints do not bear {'; '.join(describe(refused))};"
      " give the old values or another --workdir"
    )
  return changes


def differences(old: Any, new: Any) -> Changes:
  """The keys in which two configs differ."""
  old, new = _flat(old.to_dict()), _flat(new.to_dict())
  return {k: [old[k], new[k]] for k in new if old[k] != new[k]}


def describe(changes: Changes) -> list[str]:
  """A line for each change: `config.KEY: OLD -> NEW`."""
  return [f"config.{k}: {a!r} -> {b!r}" for k, (a, b) in changes.items()]


def begin(workdir: pathlib.Path, config: Any) -> bool:
  """Keeps the settings of a run that starts, and what its model is.

  Returns:
    Whether a run with the same settings had begun in the folder.

  Raises:
    InputError: the folder cannot be written, or the model not be read.
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
  """Keeps what a resume changed; to be called once it has succeeded.

  Args:
    workdir: of the run.
    step: of the checkpoint that the run goes on from.
    changes: from `prepare`.

  Raises:
    InputError: the folder cannot be written.
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
    workdir: of the run.
    config: of the run.
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
  """Holds a run's files against what a checkpoint knows of them.

  Args:
    workdir: of the run.
    step: of the checkpoint.
    saved: from `facts`, when it was written.
    inputs: as of `facts`, of now.

  Returns:
    A line if rows are missing or changed, and one for each changed input.

  Raises:
    InputError: config.json is not as it was.
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
      f" {'; '.join(describe(wrong))}; write the old values back, and change"
      " keys by --config.KEY=VALUE"
    )
  before = saved.get("inputs", {})  # Earlier versions kept none.
  lines = [
    f"config.{key}: the files have changed since checkpoint {step} was saved;"
    " the run goes on with those of now"
    for key, value in inputs.items()
    if before.get(key, value) != value
  ]
  file, rows = workdir / _ROWS, saved["rows"]
  data = file.read_bytes() if file.exists() else b""
  if digest.of_bytes(data[: rows["bytes"]]) != rows["checksum"]:
    lines.append(
      f"{file}: rows that checkpoint {step} knew are missing or changed"
    )
  return lines


def set_aside(workdir: pathlib.Path, step: int) -> str:
  """Keeps what a run that goes on from an earlier step would overwrite.

  Later checkpoints move to a folder `set_aside_N`; rows and settings are copied
  there. What no checkpoint knows is written anew by a resume and not kept.

  Args:
    workdir: of the run.
    step: of the checkpoint that it goes on from; -1 if it starts anew.

  Returns:
    A line that says so; empty if there was nothing.
  """
  rows = workdir / _ROWS
  # Also those without a COMMIT, which a kill left.
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
  """A folder for each process's times of phases.

  Those of the last start, perhaps of other hosts, move to `hosts_before`.
  """
  folder, before = workdir / "hosts", workdir / "hosts_before"
  with _writing(workdir):
    if folder.exists():
      shutil.rmtree(before, ignore_errors=True)
      os.replace(folder, before)
    folder.mkdir()
  return folder


def _writing(workdir: pathlib.Path) -> contextlib.AbstractContextManager[None]:
  """Turns what the file system refuses into one line."""
  what = f"--workdir={workdir}: cannot be written"
  return as_input_error(what, "choose another directory", OSError)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
  """Dotted keys with their values as JSON has them."""

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
  """The settings of a run as it goes on, its resumes' changes included.

  Keys that it did not know have their defaults.

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
  resumes = (
    [row.get("changes") for row in metrics.read_rows(file)]
    if (file.exists())
    else []
  )
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
  """The newest complete checkpoint, or the one that is asked for.

  Args:
    workdir: of the run.
    step: its number, or 'best' by the run's checkpoint.best.

  Raises:
    InputError: there is none.
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
  """The step whose row has a metric's highest value, the first of equal ones.

  Args:
    workdir: of the run.
    metric: '' is none.
    among: steps that count; None is all.
  """
  values = {
    row["step"]: row[metric]
    for row in (metrics.read_rows(workdir / _ROWS) if metric else ())
    if row.get(metric) is not None and (among is None or row["step"] in among)
  }
  return max(values, key=values.get, default=None)


def model_path(workdir: pathlib.Path) -> str:
  """Directory with the configuration and tokenizer of a run's model."""
  return str(workdir / _MODEL)


def restore_params(
  workdir: pathlib.Path, step: int, model: str, shapes: models.Params
) -> Any:
  """Parameters of a checkpoint's model; reads no optimizer.

  Args:
    workdir: of the run.
    step: which checkpoint.
    model: 'policy' or 'critic'.
    shapes: ShapeDtypeStructs with shardings.

  Returns:
    All parameters, a nested dict.

  Raises:
    InputError: damaged, or of another model.
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
  """The policy of a run on the default device, without building the run.

  Args:
    workdir: of the run.
    step: as of `find_step`.

  Raises:
    InputError: the run, its checkpoint or its model cannot be read.
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
