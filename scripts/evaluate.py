"""Evaluates a training run's policy or any model directory.

    python scripts/evaluate.py --checkpoint=WORKDIR [--step=N|best ...]
    python scripts/evaluate.py --checkpoint=MODEL_DIR \
        --dataset=problems.jsonl,math500 [--config=configs/METHOD.py[:PRESET]]

A run brings its own settings, a model directory takes those of --config: by
default a chat prompt and numeric answers. --config.group.key=value overrides
either. --out=DIR gets a line a problem of each set. Prints tables and, as the
last line, one JSON object (of several sets an object {"sets": [...]}). Exit
code 2 for bad input.
"""

import contextlib
import dataclasses
import json
import math
import pathlib

from absl import flags, logging
from ml_collections import config_flags
from parts import command_line, program

from jaxrl_llm import config as config_lib
from jaxrl_llm.errors import InputError, as_input_error

_DEFAULT = pathlib.Path(__file__).resolve().parents[1] / "configs" / "vapo.py"
# Tokens that a model directory gets, where its context has them.
_PROMPT_LENGTH, _RESPONSE_LENGTH = 1024, 2048
_CONFIG = command_line.define_config(
  f"{_DEFAULT}:gsm8k-smoke", "Settings of a model directory; a run has its own."
)
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", "", "Workdir of a run, or Hugging Face model directory."
)
_STEP = flags.DEFINE_string(
  "step", None, "Checkpoint of a run, or 'best'; the newest by default."
)
_SETS = """Sets, with commas between: a JSONL or Parquet file, 'tfds:NAME', a
source as 'chain_sum', or a set in the Hub's cache: gsm8k, math500, aime24,
aime25, amc23, minerva, olympiadbench; by default those of the settings."""
_DATASET = flags.DEFINE_list("dataset", [], _SETS)
_OUT = flags.DEFINE_string(
  "out", None, "Folder for SET.jsonl: a problem a line, with its responses."
)
_PLUGIN = command_line.define_plugin()
_SAMPLES = flags.DEFINE_integer("samples", None, "Responses per problem, k.")
_PROBLEMS = flags.DEFINE_integer("problems", None, "Most problems; 0 is all.")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "0 is greedy.")
_TOP_P = flags.DEFINE_float("top_p", None, "Nucleus probability mass.")
_SEED = flags.DEFINE_integer("seed", None, "Of the sampling; the run's own.")


def make_config(path: pathlib.Path):
  """Settings of the run or of --config, with all overrides applied.

  Raises:
    InputError: a flag does not fit the directory.
  """
  from jaxrl_llm import workdir
  from jaxrl_llm.data import sources

  if not path.is_dir():
    raise InputError(
      f"--checkpoint={_CHECKPOINT.value}: no such directory; give the --workdir"
      " of a run or a model directory"
    )
  config = _CONFIG.value
  if workdir.is_workdir(path):
    if _CONFIG.present:
      raise InputError(
        f"--config={flags.FLAGS['config'].config_filename}: the run {path} has"
        " its own settings; leave --config out or use --config.group.key=value"
      )
    config = workdir.read_config(path)
    config.model.path = workdir.model_path(path)
    config.update_from_flattened_dict(
      config_flags.get_override_values(flags.FLAGS["config"])
    )
  else:
    config.model.path = str(path)
    if not (_DATASET.value or _CONFIG.present):
      raise InputError(
        f"--checkpoint={path} is a model directory; give --dataset, or the"
        " --config whose problems it is to solve"
      )
    if not _CONFIG.present:
      fit(config, path)
  if _DATASET.value:
    config.eval.path = ",".join(_DATASET.value)
    # Its files have the columns of the training data, if that is of files.
    files = config.data.source in sources.FILES
    config.eval.source = "" if files else "jsonl"
    if files and not config.data.path:
      config.data.source = "chain_sum"  # Nothing is trained, so none is drawn.
  for name in ("samples", "problems", "temperature", "top_p"):
    if flags.FLAGS[name].value is not None:
      config.eval[name] = flags.FLAGS[name].value
  # Slots do not change a response; they need to hold all of a problem's.
  slots = config.sampler.slots or config_lib.batch_size(config)
  config.sampler.slots = max(slots, config.eval.samples)
  return config


def fit(config, path: pathlib.Path) -> None:
  """Lengths and template that a model directory bears, unless flags say."""
  from jaxrl_llm.data.tokenizer import Tokenizer
  from jaxrl_llm.models import hf

  context = hf.read_config(str(path)).max_position_embeddings
  prompt = min(_PROMPT_LENGTH, context // 2)
  fitting = {
    "data.max_prompt_length": prompt,
    "sampler.max_response_length": min(_RESPONSE_LENGTH, context - prompt),
  }
  if Tokenizer(str(path)).chat_template is None:
    fitting |= {"data.template": "completion", "data.template_settings": {}}
  given = config_flags.get_override_values(flags.FLAGS["config"])
  config.update_from_flattened_dict(
    {key: value for key, value in fitting.items() if key not in given}
  )


def load_params(path: pathlib.Path, run):
  """The policy as the sampler holds it, and its step (None of a model)."""
  import jax
  import numpy as np

  from jaxrl_llm import models, workdir

  policy = run.learner.policy
  step = None
  if workdir.is_workdir(path):
    step = workdir.find_step(path, _STEP.value)
    params = workdir.restore_params(path, step, "policy", policy.params)
  else:
    places = jax.tree.map(lambda x: x.sharding, models.merge(policy.params))
    config, how = policy.fns.config, {"dtype": np.float32, "places": places}
    params = models.hf.read_params(path, config, **how)
  return run.transfer.send(params, 0).params, step


def evaluate(evaluator, params):
  """Samples and judges every problem.

  Returns:
    Numbers for the JSON object, and a few responses.
  """
  import numpy as np

  k = evaluator.writer.group_size
  evaluated = evaluator(params)
  if _OUT.value is not None:
    write(pathlib.Path(_OUT.value), evaluated)
  tries = [2**i for i in range(k.bit_length()) if 2**i < k] + [k]
  results = evaluated.results(tries) | evaluated.errors(tries)
  for name, value in results.items():
    if name.endswith("_se") and math.isnan(value):  # A single problem.
      results[name] = None
  lengths, seconds = evaluated.responses.rollout.lengths, evaluated.generate_s
  results |= {
    "response_length_median": float(np.median(lengths)),
    "response_length_max": int(lengths.max()),
    "generate_s": seconds,
    "tokens_per_s": float(lengths.sum() / seconds),
  }
  return results, evaluated.shown()


def write(folder: pathlib.Path, evaluated) -> None:
  """A line a problem: how many of its responses are right, and all of them.

  Raises:
    InputError: the folder cannot be written.
  """
  what = f"--out={folder}: cannot be written"
  with as_input_error(what, "choose another", OSError):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{evaluated.name}.jsonl").open("w") as file:
      for first in range(0, len(evaluated.judged.texts), evaluated.samples):
        problem = problem_of(evaluated, first)
        file.write(json.dumps(problem, allow_nan=False) + "\n")


def problem_of(evaluated, first: int) -> dict:
  """A problem with all of its responses, of which this row is the first."""
  from jaxrl_llm.types import Status

  judged, rollout = evaluated.judged, evaluated.responses.rollout
  prompt, responses = judged.prompts[first], []
  for row in range(first, first + evaluated.samples):
    verdict = judged.verdicts[row]
    responses.append(
      {
        "text": judged.texts[row],
        "extracted": verdict.extracted,
        "correct": bool(verdict.correct),
        "length": int(rollout.lengths[row]),
        "stop": Status(int(rollout.status[row])).name.lower(),
      }
    )
  return {
    **{name: getattr(prompt, name) for name in ("id", "question", "answer")},
    "correct": sum(response["correct"] for response in responses),
    "samples": evaluated.samples,
    "responses": responses,
  }


def show(title: str, results: dict, samples) -> None:
  """Prints a table of the numbers, and the responses."""
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
  # Heavy imports late: a typing error in a flag answers at once.
  from jaxrl_llm.rollout.worker import run_key
  from jaxrl_llm.system import plugin
  from jaxrl_llm.trainer import build

  where = "give the --workdir of a run or a model directory"
  if not _CHECKPOINT.value:
    raise InputError(f"--checkpoint is missing; {where}")
  for file in _PLUGIN.value:
    plugin.load(file)
  path = pathlib.Path(_CHECKPOINT.value)
  config = make_config(path)
  for file in config.run.plugins:  # Plugins of the run.
    plugin.load(file)
  owners = build.make_run(config)
  # The loop's own stream: without further flags a run's last evaluation is
  # repeated exactly. Another seed leaves the problems as they are.
  seed = config.run.seed if _SEED.value is None else _SEED.value
  key = run_key(seed, build.EVALUATION)
  found = []
  with contextlib.closing(owners.judge), contextlib.closing(owners.worker):
    params, step = load_params(path, owners)
    for one in owners.evaluators:  # With one engine, and what it compiled.
      writer = dataclasses.replace(one.writer, key=key)
      evaluator = dataclasses.replace(one, writer=writer)
      results, samples = evaluate(evaluator, params)
      count, sampled = len(evaluator.prompts), config.eval.samples
      settings = {"checkpoint": str(path), "step": step, "problems": count}
      settings |= {"dataset": evaluator.name, "seed": seed, "samples": sampled}
      settings |= {k: config.eval[k] for k in ("temperature", "top_p")}
      at = "" if step is None else f", step {step}"
      what = f"{evaluator.name}, {count} problems x {sampled} samples"
      show(f"{path}{at}: {what}", results, samples)
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
