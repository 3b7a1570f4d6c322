"""Trains a policy: flags to objects to one call.

    python scripts/train.py --config=configs/vapo.py [--workdir=DIR] \
        [--config.group.key=value ...] [--dry_run]

The same --workdir again resumes. Exit code 0 on success (also after Ctrl-C or
SIGTERM, which save first), 2 for bad input, 1 for a run that could not go on.
"""

import datetime
import json
import pathlib
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from jaxrl_llm.errors import InputError

_CONFIG = config_flags.DEFINE_config_file(
  "config", "configs/vapo.py", "Settings: configs/METHOD.py[:PRESET]."
)
_WORKDIR = flags.DEFINE_string(
  "workdir", "", "Files of the run; a dated folder under runs/ by default."
)
_DRY_RUN = flags.DEFINE_bool(
  "dry_run",
  False,
  "Compile every phase at its worst shape, print memory, check data and"
  " rewards, and exit.",
)


def prepare_workdir(config) -> pathlib.Path:
  """Makes the directory and writes the resolved config into it.

  Raises:
    InputError: it cannot be written.
  """
  now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
  workdir = pathlib.Path(_WORKDIR.value or f"runs/{now}")
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.to_dict(), indent=2, default=str)
    (workdir / "config.json").write_text(text + "\n", encoding="utf-8")
  except OSError as error:
    raise InputError(
      f"--workdir={workdir}: cannot be written ({error.strerror}); choose"
      " another directory"
    ) from error
  return workdir


def run(config) -> None:
  """Builds the job and trains it, or only tries it."""
  # Heavy imports late: a typing error in a flag answers at once.
  from jaxrl_llm.train import build, dry_run, loop

  job = build.make_job(config)
  if _DRY_RUN.value:
    dry_run.dry_run(job)
    return
  workdir = prepare_workdir(config)
  print(f"workdir {workdir}", flush=True)
  loop.train(job, workdir)


def main(argv):
  if len(argv) > 1:
    print(
      f"unexpected argument {argv[1]!r}; flags start with --", file=sys.stderr
    )
    sys.exit(2)
  logging.set_verbosity(logging.ERROR)
  try:
    run(_CONFIG.value)
  except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
  app.run(main)
