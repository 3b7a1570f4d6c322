"""Samples responses to prompts; needs a model, but no run or data set.

  python scripts/generate.py --prompt='3+5?' --out=samples.jsonl
  python scripts/generate.py --model=DIR --prompts=FILE --out=samples.jsonl
  python scripts/generate.py --prompt='3+5?' --environment=calculator --stop='='

FILE has one prompt per line or, as FILE.jsonl or FILE.parquet, rows with
"prompt" (a text or a conversation), "messages" or "question" as in training
data; other fields are copied to the output. The output has one JSON object per
line and sample: index of prompt and sample, the prompt's fields, text, tokens,
their log-probabilities, and the stop reason: "finished" (by the model or a stop
string), "overlong" or "failed" (the environment failed). The same flags give
the same samples, regardless of --slots. Ctrl-C keeps the finished samples;
--resume adds the missing ones. Exit code 2 for bad input.
"""

import argparse
import contextlib
import hashlib
import json
import pathlib
import re
import signal
import sys

import numpy as np
from parts import program

from jaxrl_llm import api
from jaxrl_llm.data import rows
from jaxrl_llm.data.prompt_source import TEMPLATES, Template
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.metrics.progress import Progress
from jaxrl_llm.rollout import turns
from jaxrl_llm.sampling import SamplingSettings
from jaxrl_llm.sampling.settings import max_tokens_of
from jaxrl_llm.system import plugin, signals
from jaxrl_llm.tools import generate

_STDIO = "-"
# Settings of conversations, see the config group `environment`.
_TURNS = {"workers": 1, "deadline_s": 10.0, "max_turns": 16}
_TURNS["max_observation_tokens"] = 256
# Options that samples do not depend on; prompts are compared one by one.
_FREE = ("prompts", "prompt", "jsonl", "out", "samples", "slots", "resume")


def check(options) -> None:
  """Checks the ranges of counts, and that --out may be written.

  Raises:
    InputError: a count is out of range, or --out cannot be used.
  """
  counts = {"samples": (1, generate.MAX_SAMPLES), "slots": (1, 1 << 20)}
  counts |= {"max_new_tokens": (1, 1 << 30), "seed": (0, (1 << 32) - 1)}
  program.check_ranges(options, **counts)
  path, to_file = pathlib.Path(options.out), options.out != _STDIO
  if options.resume and not to_file:
    raise InputError("--resume completes a file; name it with --out")
  if to_file and (path.is_dir() or not path.parent.is_dir()):
    raise InputError(f"--out={path}: give a file in a directory that exists")
  if to_file and not options.resume and path.exists() and path.stat().st_size:
    raise InputError(
      f"--out={path} exists; add --resume to complete it or choose another file"
    )


def read_requests(options) -> list[rows.Row]:
  """Returns the prompts of --prompts, then those of --prompt.

  Raises:
    InputError: there are no prompts, or they cannot be read.
  """
  requests, name = [], options.prompts
  if name is not None:
    suffix = pathlib.Path(name).suffix
    text = not options.jsonl and suffix not in (".jsonl", ".parquet")
    if name == _STDIO:
      data = sys.stdin.buffer.read()
      requests = rows.parse_rows(data, "standard input", text=text)
    else:
      requests = rows.read_rows(pathlib.Path(name), text=text)
  for number, text in enumerate(options.prompt, start=1):
    where = f"--prompt number {number}"
    if not text:
      raise InputError(f"{where} is empty; give a text")
    requests.append(rows.Row(where, {"prompt": text}))
  if not 1 <= len(requests) <= generate.MAX_PROMPTS:
    raise InputError(
      f"--prompts=FILE and --prompt=TEXT must give 1..{generate.MAX_PROMPTS}"
      f" prompts, got {len(requests)}"
    )
  return requests


def make_sampling(options, tokenizer: Tokenizer) -> SamplingSettings:
  """Returns the sampling settings of the flags.

  Raises:
    InputError: a setting is out of range.
  """
  if "" in options.stop:
    raise InputError("--stop is empty; give a text")
  forbidden = tokenizer.single_tokens(options.forbid, "--forbid")
  names = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens")
  try:
    settings = SamplingSettings(
      **{name: getattr(options, name) for name in (*names, "min_new_tokens")},
      logit_bias=dict.fromkeys(forbidden, -np.inf),
      stop_strings=tuple(options.stop),
    )
    max_tokens_of(settings, max_response_length=options.max_new_tokens)
  except ValueError as error:
    raise InputError(f"--{error}") from error
  return settings


def make_template(
  options, tokenizer: Tokenizer
) -> tuple[Template, turns.ConversationConfig | None]:
  """Makes the prompt template, and the config of environment conversations.

  Raises:
    InputError: the environment is unknown.
  """
  name = "chat" if options.chat else "completion"
  if not options.environment:
    return TEMPLATES[name](tokenizer), None
  if options.environment not in turns.ENVIRONMENTS:
    raise InputError(
      f"--environment={options.environment} is unknown; choose one of"
      f" {', '.join(filter(None, turns.ENVIRONMENTS))}"
    )
  play = turns.EnvironmentCalls(turns.ENVIRONMENTS[options.environment], {})
  template = TEMPLATES[name](tokenizer, **play.template_settings(name, {}))
  taking = turns.make_conversation_config(play, tokenizer, name, {}, **_TURNS)
  return play.opened(template), taking


def make_job(options) -> generate.Generation:
  """Makes the generation job from the flags.

  Raises:
    InputError: flags, prompts and model are incompatible.
  """
  requests = read_requests(options)
  policy = api.load(options.model, dtype=options.dtype)
  sampling = make_sampling(options, policy.tokenizer)
  template, conversations = make_template(options, policy.tokenizer)
  return policy.generation(
    requests,
    sampling,
    template=template,
    samples=options.samples,
    seed=options.seed,
    slots=options.slots,
    conversations=conversations,
    identity=_digest(options, policy),
  )


def _digest(options, policy: api.Policy) -> str:
  """Returns eight hexadecimal characters that identify the sample settings."""
  values = {k: v for k, v in vars(options).items() if k not in _FREE}
  values |= {"model": str(policy.path.resolve()), "step": policy.step}
  text = json.dumps(values, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:8]


def write_samples(job: generate.Generation, options) -> int:
  """Writes the samples that are missing from --out, and prints a summary.

  Returns:
    The exit code: 0, or 128 + number of the signal that stopped it early.

  Raises:
    InputError: the file has samples of other settings or cannot be written.
  """
  path, to_file = pathlib.Path(options.out), options.out != _STDIO
  done, count = set(), len(job.prompts)
  if to_file and path.exists():
    done = generate.resume(path, job.prompts, settings=job.settings)
  total = count * options.samples
  total -= sum(sample < options.samples for _, sample in done)
  slots = job.writer.engine.config.slots
  work = generate.chunks(count, options.samples, done=done, slots=slots)
  with contextlib.ExitStack() as stack:
    file = sys.stdout
    if to_file:
      file = stack.enter_context(path.open("a", encoding="utf-8"))
    stopped = stack.enter_context(signals.stop_on_signal())
    progress = stack.enter_context(Progress(total))
    reasons = generate.write(
      job, work, file, progress, halted=lambda: bool(stopped.signal)
    )
  show_summary(progress, reasons, total, options)
  return 128 + stopped.signal if stopped.signal else 0


def show_summary(progress, reasons, total: int, options) -> None:
  """Prints on standard error how many responses were written, and how fast."""
  rate = progress.tokens / progress.seconds
  written = f"{progress.responses:,} responses, {progress.tokens:,} tokens"
  took = f"{progress.seconds:.1f} s with compilation, {rate:,.0f} tokens/s"
  parts = [f"{written} in {took}"]
  parts += (f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
  if progress.responses < total:
    parts.append(f"{total - progress.responses:,} missing")
    if options.out != _STDIO:
      parts.append("run the same command with --resume to write them")
  print("; ".join(parts), file=sys.stderr)


def escaped(text: str) -> str:
  r"""Returns the text of a flag; \n is a new line and \\ a backslash."""
  return re.sub(r"\\([n\\])", lambda m: m[1].replace("n", "\n"), text)


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of the flags."""
  parser = program.make_parser(__doc__)
  add = parser.add_argument
  several = program.REPEATED
  text = {"metavar": "TEXT", "type": escaped, **several}
  model = "Hugging Face directory or --workdir; default: the shipped base model"
  add("--model", default="", metavar="DIR", help=model)
  add("--prompts", metavar="FILE", help="text, .jsonl, .parquet; - is stdin")
  add("--jsonl", action="store_true", help="--prompts is JSONL")
  add("--prompt", metavar="TEXT", **several, help="a prompt; repeatable")
  add("--chat", action="store_true", help="apply the model's chat template")
  add("--out", default=_STDIO, metavar="FILE", help="default: standard output")
  add("--resume", action="store_true", help="add the samples missing in --out")
  add("--samples", type=int, default=4, help="samples per prompt; default: 4")
  add("--max_new_tokens", type=int, default=256, help="default: 256")
  add("--min_new_tokens", type=int, default=0, help="earliest stop; default: 0")
  add("--temperature", type=float, default=1.0, help="default: 1; 0 is greedy")
  add("--top_k", type=int, default=0, help="default: 0, off")
  add("--top_p", type=float, default=1.0, help="default: 1, off")
  add("--min_p", type=float, default=0.0, help="default: 0, off")
  add("--plugin", metavar="FILE", **several, help="custom parts; repeatable")
  add("--environment", default="", help="replies to turns, such as calculator")
  add("--stop", **text, help=r"ends a response; \n is a new line; repeatable")
  add("--forbid", **text, help="a token that is never sampled; repeatable")
  add("--seed", type=int, default=0)
  add("--slots", type=int, default=64, help="concurrent responses; default: 64")
  add("--dtype", **program.DTYPE, help="data type of the model")
  return parser


@program.one_line
def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  options = make_parser().parse_args(arguments)
  try:
    check(options)
    for file in options.plugin:
      plugin.load(file)
    job = make_job(options)
    with contextlib.closing(job.writer):
      return write_samples(job, options)
  except KeyboardInterrupt:
    print("interrupted; --resume continues", file=sys.stderr)
    return 128 + signal.SIGINT


if __name__ == "__main__":
  sys.exit(main())
