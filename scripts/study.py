"""Runs a study, a resumable grid of variants x seeds; summarizes and plots it.

    python scripts/study.py NAME [--seeds=0,1,2] [--out=runs/studies]
    python scripts/study.py NAME --report          # of the runs so far
    python scripts/study.py NAME --variants='VAPO;PPO' --config.run.steps=20
    python scripts/study.py NAME --curves=docs/studies/NAME.csv --out=DIR
    python scripts/study.py critic --help      # accuracy of critics
    python scripts/study.py timeline --help    # overlap of sampler and learner
    python scripts/study.py NAME --config=METHOD[:PRESET] \
        --sweep=optimizer.policy.learning_rate=1e-5,2e-5 [--sweep=...]

NAME is one of the studies below or, with --sweep, a new name: its variants are
all combinations of the values. Each run is scripts/train.py in its own folder,
one after the other, so that times are comparable. A stopped run is resumed, a
finished run is skipped, and a run with other settings is an error. Ctrl-C saves
the current run and exits with 130. Writes OUT/NAME/table.md, curves.csv and
curves.png; with --curves, only from these comma-separated files. --variants
restricts all of this; the first remaining variant of the study is the baseline.
"""

import argparse
import importlib
import json
import pathlib
import signal
import subprocess
import sys
from itertools import product

from parts import program
from studies import picture, results
from studies.tables import STUDIES, Study, Variant

from jaxrl_llm import config as config_lib
from jaxrl_llm import metrics
from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.system.files import write_whole

# Studies of a single run or machine: modules of studies/ with their own flags.
PICTURES = ("critic", "timeline")


def command(
  study: Study, variant: Variant, seed: int, folder: pathlib.Path, extra: list
) -> list[str]:
  """Returns the training command of one run; `extra` are further flags."""
  changes = {**variant.changes, "run.seed": seed}
  workdir = results.run_folder(folder, variant.name, seed).resolve()
  return [
    sys.executable,
    str(pathlib.Path(__file__).with_name("train.py")),
    f"--workdir={workdir}",
    f"--config={variant.method}:{study.preset}",
    *(f"--config.{key}={value}" for key, value in changes.items()),
    *extra,
  ]


def is_done(workdir: pathlib.Path, settings: list[str]) -> bool:
  """Returns whether a run has logged the last step of its own config.

  Args:
    workdir: folder of the run, which may not have started.
    settings: flags that the run must have been started with.

  Raises:
    InputError: the folder contains a run with other settings.
  """
  rows, config = workdir / "metrics.jsonl", workdir / "config.json"
  if not rows.exists() or not config.exists():
    return False
  kept = workdir / "settings.json"
  if kept.exists() and json.loads(kept.read_text("utf-8")) != settings:
    raise InputError(
      f"{workdir} contains a run with other settings, see its settings.json;"
      " give another --out or remove the folder"
    )
  logged = metrics.read_rows(rows)
  steps = json.loads(config.read_text("utf-8"))["run"]["steps"]
  return bool(logged) and logged[-1]["step"] >= steps


def run_all(study, seeds, folder, extra) -> None:
  """Trains the unfinished runs, seed by seed across all variants.

  Raises:
    InputError: a run failed; its output is in its log.txt.
  """
  for seed in seeds:
    for variant in study.variants:
      workdir = results.run_folder(folder, variant.name, seed)
      run = command(study, variant, seed, folder, extra)
      settings = [f for f in run if f.startswith(("--config", "--plugin"))]
      if is_done(workdir, settings):
        continue
      workdir.mkdir(parents=True, exist_ok=True)
      text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
      write_whole(workdir / "settings.json", text)
      print(f"seed {seed}: {variant.name} -> {workdir}", flush=True)
      code = train(run, workdir / "log.txt")
      if code or not is_done(workdir, settings):
        raise InputError(
          f"the run of {variant.name!r}, seed {seed}, ended with exit code"
          f" {code} before its last step; see {workdir}/log.txt"
        )


def train(run: list[str], log_file: pathlib.Path) -> int:
  """Runs a training command to its end; returns its exit code."""
  with open(log_file, "a", encoding="utf-8") as log:
    how = {"stdout": log, "stderr": subprocess.STDOUT}
    # In a new session, the process gets a signal only once, from here.
    process = subprocess.Popen(run, **how, start_new_session=True)
    try:
      return process.wait()
    except KeyboardInterrupt:
      print("stopping after this step", flush=True)
      process.send_signal(signal.SIGINT)
      process.wait()
      raise


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of a study."""
  add = parser.add_argument
  add("--seeds", default="0,1,2", help="seeds, comma-separated")
  add("--out", default="runs/studies", help="output folder")
  add("--variants", help="names of variants, separated by ';'")
  add("--plugin", **program.REPEATED, help="Python file of custom parts")
  add("--report", action="store_true", help="only report the runs so far")
  add("--curves", metavar="FILES", help="only report these CSV files")
  add("--config", metavar="METHOD[:PRESET]", help="method of a sweep")
  sweep = program.REPEATED | {"metavar": "KEY=VALUE,VALUE"}
  add("--sweep", **sweep, help="repeat for a product of keys")


def find_study(options: argparse.Namespace) -> Study:
  """Returns the named study, or makes the study of a sweep.

  Raises:
    InputError: The study is unknown, or the sweep is invalid.
  """
  if not options.sweep and options.name in STUDIES:
    return STUDIES[options.name]
  if not options.sweep or not options.config or options.name in STUDIES:
    raise InputError(
      f"{options.name}: give one of {', '.join([*STUDIES, *PICTURES])}, or"
      " another name with --config=METHOD[:PRESET] and --sweep=KEY=VALUE,VALUE"
    )
  method, _, preset = options.config.partition(":")
  values = {}
  for text in options.sweep:
    key, _, several = text.partition("=")
    # Every variant runs with all --seeds.
    if key not in config_lib.KEYS or not several or key == "run.seed":
      raise InputError(
        f"--sweep={text}: give a key of docs/config.md other than run.seed and"
        " its values, as in --sweep=loss.clip_high=0.2,0.28"
      )
    values[key] = several.split(",")
  changes = [dict(zip(values, one)) for one in product(*values.values())]
  name = lambda change: ", ".join(f"{k}={v}" for k, v in change.items())
  return Study(
    title=f"{options.name}: {', '.join(values)}",
    question=f"Which {' and '.join(values)}?",
    variants=tuple(Variant(name(one), method, one) for one in changes),
    preset=preset,
    target=0.65,
  )


def compare(options: argparse.Namespace) -> None:
  """Runs, summarizes and plots a study.

  Raises:
    InputError: a flag is invalid, or a run failed.
  """
  study = find_study(options)
  folder = pathlib.Path(options.out) / options.name
  wanted = options.variants.split(";") if options.variants else None
  chosen = study.only(wanted) if wanted else study
  if wanted and len(chosen.variants) != len(wanted):
    names = "; ".join(a.name for a in study.variants)
    raise InputError(f"--variants={options.variants!r}: choose from {names}")
  # Runs have their own working directory.
  files = [pathlib.Path(file).resolve() for file in options.plugin]
  extra = [*options.extra, *(f"--plugin={file}" for file in files)]
  seeds = _seeds(options.seeds)
  if options.curves:
    files = [pathlib.Path(file) for file in options.curves.split(",")]
    read = results.read_curves(study, files)
    names = (variant.name for variant in chosen.variants)
    outcomes = {name: read[name] for name in names if name in read}
    folder.mkdir(parents=True, exist_ok=True)
  else:
    if not options.report:
      run_all(chosen, seeds, folder, extra)
    outcomes = results.load_outcomes(chosen, folder, seeds)
  if not outcomes:
    raise InputError(f"{folder} has no runs yet; leave out --report")
  print(results.write_table(chosen, outcomes, folder / "table.md"))
  results.write_curves(outcomes, folder / "curves.csv")
  picture.draw(chosen, outcomes, folder / "curves.png")
  print(f"wrote table.md, curves.csv and curves.png into {folder}")


@program.one_line
def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = program.make_parser(__doc__)
  studies = (f"  {name:16} {x.title}" for name, x in STUDIES.items())
  parser.epilog = "\n".join(["studies:", *studies])
  parser.add_argument("name", nargs="?", metavar="NAME")
  given = sys.argv[1:] if arguments is None else arguments
  # Imported on demand, because it imports the training code.
  found = [x for x in given if x in PICTURES]
  one = importlib.import_module(f"studies.{found[0]}") if found else None
  if one:
    parser.description = one.__doc__
  (one.add_flags if one else add_flags)(parser)
  options, options.extra = parser.parse_known_args(given)
  if options.name is None:
    parser.error(f"give a NAME: {', '.join([*STUDIES, *PICTURES])}; see --help")
  unknown = [x for x in options.extra if one or not x.startswith("--config.")]
  if unknown:
    raise InputError(f"{unknown[0]}: no such flag; see --help")
  try:
    (one.run if one else compare)(options)
  except KeyboardInterrupt:
    print("stopped; run the same command to continue")
    return 128 + signal.SIGINT
  return 0


def _seeds(text: str) -> list[int]:
  advice = "give numbers, as in 0,1,2"
  with as_input_error(f"--seeds={text!r}", advice, ValueError):
    return list(dict.fromkeys(int(seed) for seed in text.split(",")))


if __name__ == "__main__":
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  sys.exit(main())
