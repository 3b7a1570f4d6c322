"""Trains a policy.

    python scripts/train.py --config=configs/vapo.py [--workdir=DIR] \
        [--config.group.key=value ...] [--plugin=FILE.py] [--dry_run]
    python scripts/train.py --help_config    # every key

Running again with the same --workdir resumes with the run's own settings, which
need not be repeated: --workdir=DIR alone suffices. --config.KEY=VALUE changes
settings that do not invalidate the checkpoints; changes are printed and saved.
If --config is given, it must name the run's method. --step=N resumes from an
earlier checkpoint.

Exit code 0 after the last step, 2 for bad input, 1 if the run could not
continue. Ctrl-C and SIGTERM save first and exit with 130 and 143 (128 +
signal). With --config.run.on_suspect=stop, 75 if one of several hosts is slow:
the run is saved, so that it can be resumed without that host.
"""

import datetime
import pathlib
import signal
import sys
import time
import traceback
import warnings

from absl import flags, logging
from ml_collections import config_flags
from parts import command_line

from jaxrl_llm import config as config_lib
from jaxrl_llm.errors import InputError

_BEGUN = time.perf_counter()
# Not a default: it gives --config.KEY its type when a run is resumed.
_ANY = pathlib.Path(__file__).resolve().parents[1] / "configs" / "vapo.py"
_CONFIG = command_line.define_config(
  str(_ANY), "Settings: METHOD[:PRESET] or a file, FILE.py[:PRESET]."
)
_WORKDIR = flags.DEFINE_string(
  "workdir", "", "Folder of the run; default: a dated folder under runs/."
)
_STEP = flags.DEFINE_integer(
  "step", None, "Checkpoint to resume from; default: the newest."
)
_PLUGIN = command_line.define_plugin()
_COORDINATOR = flags.DEFINE_string(
  "coordinator", "", "HOST:PORT of the first of several processes."
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", 1, "Number of processes of the run.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", 0, "Index of this process, from 0.", lower_bound=0
)
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed", False, "Join the processes of Slurm, GKE or a Cloud TPU."
)
_PATIENCE_S = flags.DEFINE_integer(
  "patience_s", 100, "Seconds until a process counts as dead.", lower_bound=1
)
_HELP_CONFIG = flags.DEFINE_bool(
  "help_config", False, "Print all keys of a config and exit."
)
_DRY_RUN = flags.DEFINE_bool(
  "dry_run", False, "Compile, print memory, check data and rewards; exit."
)


def check_flags() -> None:
  """Handles --help_config; checks that no required flag is missing."""
  if _HELP_CONFIG.value:
    print(config_lib.describe())
    sys.exit(0)
  if _WORKDIR.present and not _WORKDIR.value:
    raise InputError(
      "--workdir= is empty; give a folder, or leave it out for a dated folder"
    )
  names = "config.json", "checkpoints/*/COMMIT"
  folder = pathlib.Path(_WORKDIR.value)
  known = _WORKDIR.value and any(any(folder.glob(name)) for name in names)
  if not _CONFIG.present and not known:
    raise InputError(
      "no --config; give --config=METHOD[:PRESET], see --help, or the --workdir"
      " of a run to resume"
    )
  if _NUM_PROCESSES.value > 1 and not _COORDINATOR.value:
    raise InputError(
      f"--num_processes={_NUM_PROCESSES.value} without --coordinator; give"
      " HOST:PORT of the first process, or --distributed alone"
    )


def _fail(message: str, *, code: int = 2) -> int:
  print(f"error: {message}", file=sys.stderr)
  return code


def make_config(folder: pathlib.Path):
  """Returns the settings of --config or, for a resumed run, its own.

  Raises:
    InputError: --config is not the run's method, or the run's settings are
      damaged.
  """
  from jaxrl_llm import workdir
  from jaxrl_llm.system import plugin

  given, flag = _CONFIG.value, flags.FLAGS["config"]
  given.run.plugins += tuple(
    str(pathlib.Path(p).resolve()) for p in _PLUGIN.value
  )
  if _CONFIG.present:
    file, _, preset = flag.config_filename.partition(":")
    given.run.method = pathlib.Path(file).stem + (preset and f":{preset}")
    if not workdir.steps(folder):
      return given
  config = workdir.read_config(folder)
  rows = folder / "metrics.jsonl"
  if rows.is_file() and rows.stat().st_size and not workdir.steps(folder):
    raise InputError(
      f"{folder}: contains a run without checkpoints; mount the disk of"
      f" {folder}/checkpoints if it has one, or give --config to start again"
    )
  config.update_from_flattened_dict(config_flags.get_override_values(flag))
  plugins = plugin.merged(config.run.plugins, given.run.plugins)
  config.run.plugins = given.run.plugins = plugins
  if not _CONFIG.present:
    return config
  if config.run.method not in ("", given.run.method):
    raise InputError(
      f"--config={flag.config_filename}: {folder} has a run of"
      f" {config.run.method}; leave --config out or give another --workdir"
    )
  for key, (own, other) in workdir.differences(config, given).items():
    print(f"config.{key} keeps its value {own!r}; --config has {other!r}")
  return config


def shared_config(folder: pathlib.Path):
  """Returns the config of the first process; errors as in `make_config`."""
  from jaxrl_llm import workdir
  from jaxrl_llm.system import processes

  made = []
  settings = processes.of_first(
    lambda: made.append(make_config(folder)) or workdir.flat(made[0].to_dict())
  )
  return made[0] if made else workdir.to_config(settings)


def run() -> int:
  """Builds the components of a run and trains, or does a dry run.

  Returns:
    The exit code.
  """
  # Slow imports come late, so that a typo in a flag is reported at once.
  import jax

  from jaxrl_llm import __version__, workdir
  from jaxrl_llm.system import plugin, processes, signals
  from jaxrl_llm.trainer import build, loop

  if _COORDINATOR.value or _DISTRIBUTED.value:
    all_of_it = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
    processes.connect(*all_of_it, patience_s=_PATIENCE_S.value)
  own = workdir.flat(_CONFIG.value.to_dict(), "config.")
  names = "workdir", "step", "plugin", "dry_run"
  own |= {f"--{name}": flags.FLAGS[name].value for name in names}
  versions = {"version": __version__, "JAX": jax.__version__}
  processes.check_same(own | versions)
  now = f"runs/{datetime.datetime.now():%Y%m%d-%H%M%S}"
  folder = pathlib.Path(_WORKDIR.value or processes.of_first(lambda: now))
  config = shared_config(folder)
  for path in config.run.plugins:
    plugin.load(path)
  components = build.make_run(config)
  inputs = components.inputs.items()
  processes.check_same({f"a digest of config.{k}": x for k, x in inputs})
  if _DRY_RUN.value:
    from parts import dry_run

    dry_run.dry_run(components)
    return 0
  print(f"workdir {folder}", flush=True)
  number = loop.train(components, folder, step=_STEP.value, begun=_BEGUN)
  return number if number in (0, signals.SUSPECT) else 128 + number


def _unraisable(fault) -> None:
  """Ignores an error that the threads of a failed save leave behind."""
  if "Event loop is closed" not in str(fault.exc_value):
    sys.__unraisablehook__(fault)


def main(argv):
  del argv
  from jaxrl_llm.errors import TrainingStopped
  from jaxrl_llm.system import processes

  # For a failed save, Orbax logs hundreds of lines in addition to raising.
  logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = _unraisable
  warnings.filterwarnings("ignore", "coroutine .* was never awaited")
  try:
    return run()
  except InputError as error:
    return _fail(str(error))
  except (TrainingStopped, OSError) as error:  # Such as a full disk.
    return _fail(str(error), code=1)
  except SystemExit as error:  # User code: a loss, a source.
    frames = traceback.extract_tb(error.__traceback__)
    at = [f for f in frames if not f.filename.startswith("<frozen")][-1]
    said = (
      f"{at.filename}:{at.lineno} called exit({error.code!r});"
      " raise an error instead, and rerun with the same --workdir to continue"
    )
    return _fail(said, code=1)
  except KeyboardInterrupt:  # Before the loop, which handles it itself.
    said = "stopped before training began; there is nothing to save"
    return _fail(said, code=128 + signal.SIGINT)
  finally:
    processes.disconnect()


if __name__ == "__main__":
  command_line.run(main, check_flags)
