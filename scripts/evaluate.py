"""Evaluates a training run's policy or any model directory.

    python scripts/evaluate.py --checkpoint=WORKDIR [--step=N|best ...]
    python scripts/evaluate.py --checkpoint=MODEL_DIR \
        --dataset=problems.jsonl,math500 [--config=configs/METHOD.py[:PRESET]]

A run has its own settings; a model directory uses those of --config, by default
a chat prompt and numeric answers. Python files that the settings of a run name
(its plugins and rewards) run only if given by --plugin, or with --trust_code.
--config.group.key=value overrides either.
--critic and --search use the critic of a run. --out=DIR writes one line per
problem of each set. Prints tables and, as the last line, one JSON object (with
several sets, {"sets": [...]}). Exit code 2 for bad input.
"""

import json
import math
import pathlib

from absl import flags, logging
from ml_collections import config_flags
from parts import command_line, program

from jaxrl_llm.errors import InputError, as_input_error

_DEFAULT = pathlib.Path(__file__).resolve().parents[1] / "configs" / "vapo.py"
_CONFIG = command_line.define_config(
  f"{_DEFAULT}:gsm8k-smoke", "Settings, for a model directory only."
)
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", "", "--workdir of a run, or Hugging Face model directory."
)
_STEP = flags.DEFINE_string(
  "step", None, "Checkpoint of a run, or 'best'; default: the newest."
)
_SETS = """Comma-separated sets: a JSONL or Parquet file, 'tfds:NAME', a source
such as 'chain_sum', or a set in the Hub's cache: gsm8k, math500, aime24,
aime25, amc23, minerva, olympiadbench; default: the sets of the settings."""
_DATASET = flags.DEFINE_list("dataset", [], _SETS)
_OUT = flags.DEFINE_string(
  "out", None, "Folder of SET.jsonl: a problem and its responses per line."
)
_PLUGIN = command_line.define_plugin()
_TRUST = flags.DEFINE_bool(
  "trust_code", False, "Run the Python files that the run's settings name."
)
_SAMPLES = flags.DEFINE_integer("samples", None, "Responses per problem, k.")
_PROBLEMS = flags.DEFINE_integer("problems", None, "Max. problems; 0 is all.")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "0 is greedy.")
_TOP_P = flags.DEFINE_float("top_p", None, "Nucleus probability mass.")
_SEED = flags.DEFINE_integer("seed", None, "Sampling seed; default: run.seed.")
_SEARCH = flags.DEFINE_enum(
  "search",
  None,
  ["particles", "dora", "beam"],  # Of `rollout.search`, which imports JAX.
  "Test-time search with the run's critic; implies --critic.",
)
_CRITIC = flags.DEFINE_bool(
  "critic", False, "Adds best@k and weighted_maj@k by the run's critic."
)


def make_config(policy):
  """Returns the settings of the run or of --config, with all overrides.

  Raises:
    InputError: a flag cannot be used with this kind of directory.
  """
  from jaxrl_llm.tools import evaluation

  given = config_flags.get_override_values(flags.FLAGS["config"])
  for name in ("samples", "problems", "temperature", "top_p"):
    if flags.FLAGS[name].value is not None:
      given[f"eval.{name}"] = flags.FLAGS[name].value
  if policy.step is not None and _CONFIG.present:
    raise InputError(
      f"--config={flags.FLAGS['config'].config_filename}: the run"
      f" {policy.path} has its own settings; leave --config out or use"
      " --config.group.key=value"
    )
  if policy.step is None and not (_DATASET.value or _CONFIG.present):
    raise InputError(
      f"--checkpoint={policy.path} is a model directory; give --dataset, or a"
      " --config that has evaluation problems"
    )
  config = _CONFIG.value if _CONFIG.present else None
  datasets = ",".join(_DATASET.value)
  return evaluation.make_config(policy, datasets, given, config)


def results_of(evaluated) -> dict[str, float | None]:
  """Returns the numbers of an evaluation for the JSON object."""
  import numpy as np

  from jaxrl_llm.evaluate import pass_counts

  tries = pass_counts(evaluated.samples)
  results = evaluated.results(tries) | evaluated.errors(tries)
  for name, value in results.items():
    if name.endswith("_se") and math.isnan(value):  # A single problem.
      results[name] = None
  lengths, seconds = evaluated.responses.rollout.lengths, evaluated.generate_s
  return results | {
    "response_length_median": float(np.median(lengths)),
    "response_length_max": int(lengths.max()),
    "generate_s": seconds,
    "generated_tokens": evaluated.generated,
    "tokens_per_s": float(evaluated.generated / seconds),
  }


def make_folder(folder: pathlib.Path, evaluated_on: str) -> None:
  """Makes the folder of --out, before anything is sampled.

  Args:
    folder: value of --out.
    evaluated_on: `eval.path`.

  Raises:
    InputError: the folder cannot be made, or a file of responses in it would
      replace a file that is evaluated on.
  """
  from jaxrl_llm.data import rows

  with _writing(folder):
    folder.mkdir(parents=True, exist_ok=True)
  for file in rows.files(evaluated_on):
    out = folder / f"{file.stem}.jsonl"
    if out.exists() and file.exists() and out.samefile(file):
      raise InputError(
        f"--out={folder}: would overwrite {file}, the evaluation data; choose"
        " another folder"
      )


def write(folder: pathlib.Path, evaluated) -> None:
  """Writes one line per problem: its responses and the number of correct ones.

  Raises:
    InputError: the folder cannot be written.
  """
  with (
    _writing(folder),
    (folder / f"{evaluated.name}.jsonl").open("w") as file,
  ):
    for first in range(0, len(evaluated.judged.texts), evaluated.samples):
      problem = problem_of(evaluated, first)
      file.write(json.dumps(problem, allow_nan=False) + "\n")


def _writing(folder: pathlib.Path):
  """Turns errors of the file system into an InputError."""
  what = f"--out={folder}: cannot be written"
  return as_input_error(what, "choose another folder", OSError)


def problem_of(evaluated, first: int) -> dict:
  """Returns a problem and all of its responses; `first` is their first row."""
  from jaxrl_llm import metrics

  prompt, rows = evaluated.judged.prompts[first], range(evaluated.samples)
  samples = metrics.make_samples(evaluated.judged, [first + i for i in rows])
  responses = [
    {"text": x.response, "extracted": x.extracted, "correct": bool(x.correct)}
    | {"length": x.length, "stop": x.stop}
    for x in samples
  ]
  return {
    **{name: getattr(prompt, name) for name in ("id", "question", "answer")},
    "correct": sum(response["correct"] for response in responses),
    "samples": evaluated.samples,
    "responses": responses,
  }


def show(title: str, results: dict, samples) -> None:
  """Prints a table of the results, and some responses."""
  from jaxrl_llm import metrics

  print(f"{metrics.printable(title)}\n")
  table = program.Table("metric | value")
  for name, value in results.items():
    if not name.endswith("_se"):
      error = results.get(f"{name}_se")
      spread = "" if error is None else f" ± {error:.4f}"
      shown = f"{value:,}" if type(value) is int else f"{value:,.4f}"
      table.row(name, f"{shown}{spread}")
  for line in ("some responses", *metrics.sample_lines(samples)):
    print(metrics.printable(line))


def run() -> None:
  """Loads, evaluates and prints."""
  # Slow imports come late, so that a typo in a flag is reported at once.
  from jaxrl_llm import api
  from jaxrl_llm.system import plugin
  from jaxrl_llm.tools import evaluation

  where = "give the --workdir of a run or a model directory"
  if not _CHECKPOINT.value:
    raise InputError(f"--checkpoint is missing; {where}")
  for file in _PLUGIN.value:
    plugin.load(file)
  how = {"step": _STEP.value, "trust_code": _TRUST.value}
  policy = api.load(_CHECKPOINT.value, **how)
  config = make_config(policy)
  config.run.plugins = plugin.merged(config.run.plugins, _PLUGIN.value)
  if _OUT.value:
    make_folder(pathlib.Path(_OUT.value), config.eval.path)
  seed = config.run.seed if _SEED.value is None else _SEED.value
  found = []
  how = {"critic": _CRITIC.value, "search": _SEARCH.value or ""}
  evaluations = evaluation.evaluations(policy, config, seed=seed, **how)
  for evaluated in evaluations:
    if _OUT.value:
      write(pathlib.Path(_OUT.value), evaluated)
    results, count = results_of(evaluated), evaluated.problems
    settings = {"checkpoint": str(policy.path), "step": policy.step}
    settings |= {"problems": count, "dataset": evaluated.name, "seed": seed}
    names = ("samples", "temperature", "top_p")
    settings |= {name: config.eval[name] for name in names}
    at = "" if policy.step is None else f", step {policy.step}"
    what = f"{evaluated.name}, {count} problems x {evaluated.samples} samples"
    show(f"{policy.path}{at}: {what}", results, evaluated.shown())
    found.append(settings | results)
  last = found[0] if len(found) == 1 else {"sets": found}
  print(json.dumps(last, allow_nan=False), flush=True)


@program.one_line
def main(argv) -> None:
  """Runs the command."""
  del argv
  logging.set_verbosity(logging.ERROR)
  run()


if __name__ == "__main__":
  command_line.run(main)
