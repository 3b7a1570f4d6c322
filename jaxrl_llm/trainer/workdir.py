"""Manages the directory of a run for the run itself.

Methods of `Workdir` run in the first process; all processes must call them and
get the same result or error. `jaxrl_llm.workdir` reads the directories of other
runs.
"""

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxrl_llm import base_models, checkpoint, digest, metrics
from jaxrl_llm import config as config_lib
from jaxrl_llm import workdir as reading
from jaxrl_llm.config import Settings
from jaxrl_llm.data import sources
from jaxrl_llm.errors import InputError, TrainingStopped, as_input_error
from jaxrl_llm.learner import core
from jaxrl_llm.models.files import hf
from jaxrl_llm.system import files, processes
from jaxrl_llm.trainer import validation
from jaxrl_llm.workdir import Changes

_DATA = "data.path"
_RUN_ID = re.compile(rb"[0-9a-f]{32}")


def _of_first(method: Callable[..., Any]) -> Callable[..., Any]:
  """Runs a method in the first process; see `processes.of_first`.

  Such methods must not call each other, or the first process would wait for the
  others forever.
  """

  @functools.wraps(method)
  def run(self, *args):
    return processes.of_first(method, self, *args)

  return run


def _text(config: Settings) -> str:
  """Returns the text of config.json."""
  return json.dumps(config.to_dict(), indent=2, default=str) + "\n"


def _clear(place: pathlib.Path) -> None:
  """Removes a file, or a folder in its place."""
  if place.is_dir():
    shutil.rmtree(place)
  place.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Workdir:
  """The directory of a run that is trained or resumed."""

  path: pathlib.Path
  # Descriptor of the folder, once it is held.
  _folder: list[int] = dataclasses.field(default_factory=list, repr=False)

  @contextlib.contextmanager
  def held(self) -> Iterator[None]:
    """Creates the directory and locks it against other runs.

    Raises:
      InputError: It cannot be written or contains a model, or another process
        trains in it.
    """
    with contextlib.ExitStack() as stack:
      processes.of_first(stack.enter_context, self._locked())
      yield

  @contextlib.contextmanager
  def _locked(self) -> Iterator[None]:
    if hf.is_model(self.path) and not reading.is_workdir(self.path):
      raise InputError(
        f"--workdir={self.path}: contains a model, whose config.json the run"
        " would overwrite; choose another directory"
      )
    with self._writing():
      self.path.mkdir(parents=True, exist_ok=True)
      for name in (reading.ROWS, "checkpoints"):
        place, folder = self.path / name, name == "checkpoints"
        if place.exists() and place.is_file() == folder:
          what = "folder" if folder else "file"
          raise InputError(f"{place}: not a {what}; move it away")
      file = (self.path / "lock").open("a")
      self._folder[:] = [os.open(self.path, os.O_RDONLY)]
    with file:
      try:
        # The system releases the lock however the process ends. It also works
        # across machines if the file system supports locks, as NFS 4 does.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        raise InputError(
          f"--workdir={self.path}: another process trains in it; stop that one"
          " or choose another directory"
        ) from None
      except OSError:
        print(f"{self.path}: cannot be locked; do not start a second run in it")
      try:
        yield
      finally:
        os.close(self._folder.pop())

  @_of_first
  def check(self) -> None:
    """Checks that the path is still that of the folder that is held.

    Raises:
      TrainingStopped: The folder was moved or deleted, so that nothing can be
        saved.
    """
    with contextlib.suppress(FileNotFoundError):
      if os.path.samestat(os.stat(self.path), os.fstat(self._folder[0])):
        return
    now = os.path.realpath(f"/proc/self/fd/{self._folder[0]}")
    todo = f"resume with --workdir={now}"
    if not os.path.isdir(now):
      now, todo = "", "restore it from a copy"
    raise TrainingStopped(
      f"{self.path}: the folder of this run was"
      f" {f'moved to {now}' if now else 'deleted'} while it trained; {todo}"
    )

  @_of_first
  def steps(self, step: int | None = None) -> list[int]:
    """Returns the steps of the complete checkpoints, or only the given one.

    Raises:
      InputError: There is no such checkpoint.
    """
    if step is not None:
      return [reading.find_step(self.path, step)]
    return reading.steps(self.path)

  @_of_first
  def changes(self, config: Settings) -> Changes:
    """Compares the settings of the run with the given ones.

    Writes nothing: a refused resume leaves the directory unchanged.

    Args:
      config: the new settings.

    Returns:
      The changes; empty without a checkpoint, as the run starts from scratch.

    Raises:
      InputError: Its settings cannot be read, or a change is incompatible with
        its checkpoints.
    """
    if not reading.steps(self.path):
      validation.check_effect(config)
      return {}
    changes = reading.differences(reading.read_config(self.path), config)
    moved, fixed = set(), {config_lib.FIXED}
    shaping = core.compose(config).shaped_by
    if config.schedule.window or config.schedule.stop != "all":
      fixed.add(config_lib.IN_FLIGHT)
    if "split" not in sources.reads(config.data.source):
      fixed.add(config_lib.HELD_OUT)
    refused, base = {}, base_models.model_path(config)
    known = reading.facts(self.path).get("inputs", {}).get("model.path")
    known = known or hf.settings_digest(self.path / reading.MODEL)
    if hf.settings_digest(base) == known:
      moved.add("model.path")
    if config.data.source in sources.FILES:
      moved.add(_DATA)  # `check_facts` compares the files.
    for key, (old, new) in changes.items():
      if key in moved:
        continue
      resume = config_lib.KEYS[key].resume
      switched = resume == config_lib.SWITCH and bool(old) != bool(new)
      if resume in fixed or switched or key in shaping:
        refused[key] = [old, new]
    if refused:
      lines = "; ".join(reading.describe(refused))
      raise InputError(
        f"{self.path}: cannot change on resume: {lines}; use the old values or"
        " another --workdir"
      )
    return changes

  @_of_first
  def begin(self, config: Settings) -> bool:
    """Writes the settings of a new run, and the files of its base model.

    Returns:
      Whether a run with the same settings had already started there.

    Raises:
      InputError: The directory cannot be written, or the model cannot be read.
    """
    file, model = self.path / reading.CONFIG, self.path / reading.MODEL
    text = _text(config)
    with self._writing():
      before = file.read_bytes() if file.exists() else b""
      # Left by a run whose checkpoints were removed.
      (self.path / reading.CHANGES).unlink(missing_ok=True)
      hf.copy_settings(base_models.model_path(config), model)
      files.tree_to_disk(model)
      files.write_whole(file, text)
    return before == text.encode()

  @_of_first
  def run_id(self) -> str:
    """Returns a name of the run that no other one has.

    Raises:
      InputError: The directory cannot be written.
    """
    file = self.path / "run_id"
    with self._writing():
      if not file.is_file() or not _RUN_ID.fullmatch(file.read_bytes()):
        files.write_whole(file, uuid.uuid4().hex)
      return file.read_text(encoding="utf-8")

  @_of_first
  def repair(self, config: Settings) -> list[str]:
    """Writes damaged files of a resumed run again; returns a line for each."""
    first, changes, damaged = reading.read_settings(self.path)
    texts = {
      reading.CONFIG: _text(reading.to_config(first)),
      reading.CHANGES: "".join(json.dumps(x) + "\n" for x in changes),
    }
    base, model = base_models.model_path(config), self.path / reading.MODEL
    with self._writing():
      for name in damaged:
        _clear(self.path / name)
        files.write_whole(self.path / name, texts[name])
      if hf.settings_digest(base) != hf.settings_digest(model):
        hf.copy_settings(base, model)
        files.tree_to_disk(model)
        damaged.append(reading.MODEL)
    return [f"{name} was damaged: written again" for name in damaged]

  @_of_first
  def drop_damaged_rows(self) -> list[str]:
    """Drops damaged lines of the run's rows; returns a line for each file."""
    names = reading.ROWS, "samples.jsonl", "value_pretrain.jsonl"
    with self._writing():
      found = filter(pathlib.Path.is_file, map(self.path.joinpath, names))
      return list(itertools.chain(*map(metrics.mend, found)))

  @_of_first
  def record(self, step: int, changes: Changes) -> None:
    """Records the changes of a resume, once it has succeeded.

    Args:
      step: step of the checkpoint that is resumed.
      changes: result of `changes`.

    Raises:
      InputError: The directory cannot be written.
    """
    if not changes:
      return
    file = self.path / reading.CHANGES
    with self._writing():
      before = file.read_text(encoding="utf-8") if file.exists() else ""
      line = json.dumps({"step": step, "changes": changes})
      files.write_whole(file, f"{before}{line}\n")

  @_of_first
  def facts(
    self, config: Settings, inputs: Mapping[str, str]
  ) -> dict[str, Any]:
    """Returns facts about the run's other files, for `check_facts`.

    Args:
      config: config of the run.
      inputs: key of the config -> digest of the files that it names.
    """
    rows = (self.path / reading.ROWS).read_bytes()
    return {
      "config": reading.flat(config.to_dict()),
      "changes": reading.read_settings(self.path)[1],
      "rows": {"bytes": len(rows), "checksum": digest.of_bytes(rows)},
      "inputs": dict(inputs),
    }

  @_of_first
  def check_facts(
    self,
    step: int,
    saved: Mapping[str, Any],
    inputs: Mapping[str, str],
    changes: Changes,
  ) -> list[str]:
    """Compares the run's files with the facts stored in a checkpoint.

    Args:
      step: step of the checkpoint.
      saved: result of `facts` at that step.
      inputs: current inputs, as in `facts`.
      changes: result of `changes`.

    Returns:
      A line if rows are missing or changed, and one for each changed input.

    Raises:
      InputError: config.json has changed, or data.path names other data.
    """
    past = reading.read_settings(self.path)[1]
    changed = {key for row in past for key in row["changes"]}
    now = reading.flat(reading.read_config(self.path).to_dict())
    wrong = {
      key: [value, now[key]]
      for key, value in saved["config"].items()
      if key in now and key not in changed and value != now[key]
    }
    if wrong:
      raise InputError(
        f"{self.path / reading.CONFIG}: it has changed since checkpoint {step}"
        f" was saved: {'; '.join(reading.describe(wrong))}; restore the old"
        " values, and change settings by --config.KEY=VALUE"
      )
    before = saved["inputs"]
    if _DATA in changes and before.get(_DATA) != inputs[_DATA]:
      (line,) = reading.describe({_DATA: changes[_DATA]})
      raise InputError(
        f"{self.path}: cannot change on resume: {line}, because the files"
        f" differ from those of checkpoint {step}; give copies of the same"
        " files or another --workdir"
      )
    if before.get("model.path") not in (None, inputs.get("model.path")):
      raise InputError(
        "config.model.path: its configuration or tokenizer has changed since"
        f" checkpoint {step} was saved; restore it from a copy, such as"
        f" {self.path / reading.MODEL}"
      )
    lines = [
      f"config.{key}: the files have changed since checkpoint {step} was saved;"
      " the run continues with the current ones"
      for key, value in inputs.items()
      if before.get(key, value) != value
    ]
    file, rows = self.path / reading.ROWS, saved["rows"]
    data = file.read_bytes() if file.exists() else b""
    if digest.of_bytes(data[: rows["bytes"]]) != rows["checksum"]:
      lines.append(
        f"{file}: rows before checkpoint {step} are missing or changed"
      )
    return lines

  @_of_first
  def set_aside(self, step: int) -> str:
    """Sets aside files that a resume from an earlier step would overwrite.

    Later checkpoints move to a folder `set_aside_N`; rows and settings are
    copied there. Rows after the last checkpoint are not kept: a resume repeats
    them.

    Args:
      step: step of the checkpoint that is resumed; -1 for a new start.

    Returns:
      A message about it; empty if nothing was set aside.
    """
    rows, saved = self.path / reading.ROWS, self.path / "checkpoints"
    # Including incomplete ones, left by a kill.
    names = [place.name for place in saved.glob("*")]
    late = sorted(
      int(n) for n in names if checkpoint.is_step(n) and int(n) > step
    )
    if not late and (step >= 0 or not rows.exists() or not rows.stat().st_size):
      return ""
    places = (self.path / f"set_aside_{i}" for i in itertools.count(1))
    folder = next(place for place in places if not place.exists())
    with self._writing():
      (folder / "checkpoints").mkdir(parents=True)
      for file in filter(pathlib.Path.is_file, self.path.glob("*.json*")):
        shutil.copy2(file, folder)
      for name in map(str, late):
        os.replace(saved / name, folder / "checkpoints" / name)
    what = f"checkpoints {', '.join(map(str, late))} and" if late else "the"
    return f"{what} earlier rows are set aside in {folder}"

  def new_times(self) -> pathlib.Path:
    """Creates the folder for the phase times of each process.

    Times of the previous start, perhaps on other hosts, move to `hosts_before`.
    """
    folder = processes.of_first(self._make_times)
    processes.await_files(folder)
    return folder

  def _make_times(self) -> pathlib.Path:
    folder, before = self.path / "hosts", self.path / "hosts_before"
    with self._writing():
      if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        os.replace(folder, before)
      folder.mkdir()
    return folder

  def _writing(self) -> contextlib.AbstractContextManager[None]:
    """Turns errors of the file system into an InputError."""
    what = f"--workdir={self.path}: cannot be written"
    return as_input_error(what, "choose another directory", OSError)
