"""Measures other programs in the same run as ours.

On a shared machine, numbers of different days are not comparable, so ratios are
taken between programs that run alternately, each in a fresh process. A program
reports its numbers as a JSON object at the end of its standard output: in the
format of the benchmark programs of Tunix and TRL, or as a flat object with our
own keys (`tokens_per_s`, `step_s`, `update_s`, ...).
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.summary import Numbers, speed_ratios, summarize, wait_until_idle

from jaxrl_llm.errors import InputError

_FIELDS = ("num_layers", "hidden_size", "intermediate_size", "num_heads")
_FIELDS += ("num_kv_heads", "vocab_size")


def _fields(*sizes: int) -> dict[str, int]:
  return dict(zip(_FIELDS, sizes, strict=True))


# Models that other programs measure too, as fields of `models.ModelConfig`;
# heads have 64 dimensions.
SHAPES = {
  "tiny": _fields(4, 256, 1024, 4, 2, 4096),
  "smollm2-135m": _fields(30, 576, 1536, 9, 3, 49152),
}
# Their names in other programs.
_ALIASES = {"smollm2-135m": ("smollm2", "smollm135m")}

# Metrics compared by each part. Larger is better for `*_per_s`, smaller for
# all others.
COMPARED = {
  "sampler": ("tokens_per_s", "best_tokens_per_s", "cpu_s"),
  "rollouts": ("tokens_per_s", "best_tokens_per_s"),
  "train_step": "step_s best_step_s step_cpu_s generate_s update_s"
  " update_tokens_per_s peak_rss_gib".split(),
  "estimators": ("gae_s",),
}
# Other spellings of a key, most specific first: a program may use the same name
# for a part of its step and for something else.
_SPELLINGS = {
  "tokens_per_s": ("sampler.tokens_per_s", "generate_tokens_per_s"),
  "best_tokens_per_s": (
    "sampler.best_tokens_per_s",
    "generate_best_tokens_per_s",
  ),
  "cpu_s": ("sampler.cpu_s",),
  "step_cpu_s": ("grpo.cpu_s",),
  "step_s": ("grpo.step_s", "grpo_step_s"),
  "best_step_s": ("grpo.best_step_s", "grpo_best_step_s"),
  "generate_s": ("grpo.rollout_s", "grpo_generation_s"),
  "update_s": ("grpo.update_s", "grpo_train_s"),
  "update_tokens_per_s": ("fwd_bwd_tokens_per_s",),
  # In units of 2^20 KiB, despite its name.
  "peak_rss_gib": ("peak_rss_gb", "peak_rss_mib"),
}
_FACTORS = {"peak_rss_mib": 1 / 1024}  # Conversions to our units.
_OURS = "ours"


def last_json_object(text: str) -> dict[str, Any] | None:
  """Returns the last JSON object of an output, which may span several lines.

  An object begins at the start of a line, and only blanks follow it on its last
  line. Returns None if there is no such object.
  """
  decoder = json.JSONDecoder()
  for match in reversed(list(re.finditer(r"^\{", text, re.MULTILINE))):
    try:
      value, end = decoder.raw_decode(text, match.start())
    except (ValueError, RecursionError):
      continue
    if not text[end:].split("\n", 1)[0].strip():
      return value
  return None


def read_numbers(
  record: Mapping[str, Any], *, part: str, shape: str
) -> Numbers:
  """Reads a program's measurements, converted to our keys and units.

  Args:
    record: the JSON object that the program printed.
    part: a key of `COMPARED`.
    shape: the measured shape; if the program reports a shape, it must agree.

  Returns:
    Key -> number for the keys of the part that the program reports, at least
    one; lists of values are replaced by their medians.

  Raises:
    InputError: the shape differs, all keys are missing, or a value is not a
      positive number.
  """
  record = _of_shape(record, shape)
  numbers = {}
  for key in COMPARED[part]:
    names = (*_SPELLINGS.get(key, ()), key)
    found = [x for x in names if _at(record, x) is not None]
    if found:
      value = _at(record, found[0])
      values = value if isinstance(value, list) else [value]
      if not (values and all(map(_is_positive, values))):
        raise InputError(f"its {found[0]} is {value!r}, not a positive number")
      numbers[key] = statistics.median(values) * _FACTORS.get(found[0], 1.0)
  if not numbers:
    raise InputError(f"its JSON object has none of {', '.join(COMPARED[part])}")
  return numbers


def _of_shape(record: Mapping[str, Any], shape: str) -> Mapping[str, Any]:
  """Returns the part of a record for a shape."""
  names = (shape, *_ALIASES.get(shape, ()))
  results = record.get("results")
  if not isinstance(results, Mapping):
    if record.get("shape", shape) not in names:
      raise InputError(f"it measured shape {record['shape']!r}, not {shape!r}")
    return record
  found = next((results[name] for name in names if name in results), None)
  if not isinstance(found, Mapping):
    raise InputError(f"it measured {sorted(results)}, not {shape!r}")
  return found.get("trl", found)


def _at(record: Mapping[str, Any], path: str) -> Any:
  for name in path.split("."):
    record = record.get(name) if isinstance(record, Mapping) else None
  return record


def _is_positive(value: Any) -> bool:
  return type(value) in (int, float) and math.isfinite(value) and value > 0


class OutOfTimeError(InputError):
  """A program took too long."""


def run_lines(
  command: str | Sequence[str], *, timeout_s: float
) -> Iterator[str]:
  """Runs a program and yields the lines of its output as they are printed.

  Args:
    command: a shell command, or a list of arguments.
    timeout_s: seconds after which it is killed, with its children.

  Raises:
    InputError: it failed; the yielded lines are valid.
    OutOfTimeError: it took too long; the yielded lines are valid.
  """
  with tempfile.TemporaryFile("w+", errors="replace") as errors:
    pipes = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
    pipes |= {"errors": "replace", "start_new_session": True}
    shell = isinstance(command, str)
    process = subprocess.Popen(command, shell=shell, **pipes)

    def kill():
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout_s, kill)
    timer.start()
    try:
      yield from process.stdout
      process.wait()
    finally:
      late = not timer.is_alive()
      timer.cancel()
      kill()
      process.wait()
    if late:
      raise OutOfTimeError(f"took more than {timeout_s:g} s")
    if process.returncode:
      errors.seek(0)
      said = errors.read().strip().splitlines() or ["no error output"]
      raise InputError(f"exit code {process.returncode}: {said[-1]}")


def run_program(
  command: str | Sequence[str], *, timeout_s: float
) -> dict[str, Any]:
  """Runs a program with `run_lines`; returns the last JSON object it prints.

  Raises:
    InputError: as in `run_lines`, or there is no JSON object.
  """
  record = last_json_object("".join(run_lines(command, timeout_s=timeout_s)))
  if record is None:
    raise InputError("printed no JSON object at the end of its output")
  return record


def side_by_side(
  ours: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
  """Runs ours and the peers alternately in fresh processes: A B, B A, ...

  Args:
    ours: arguments of a program that prints the result of `summarize`.
    options: flags of scripts/benchmark.py; `peers` maps names to shell
      commands.

  Returns:
    Our medians and spread over the rounds; those of every peer in `peers`; our
    `ratios` to each peer; and the `errors` of failed peers, which are not run
    again and have no numbers.

  Raises:
    RuntimeError: our own program failed.
  """
  commands, errors = {_OURS: ours} | options.peers, {}
  numbers = {name: [] for name in commands}
  for i in range(options.rounds):
    for name in list(numbers)[:: -1 if i % 2 else 1]:
      wait_until_idle(options.wait_idle)
      print(f"running {name}", file=sys.stderr, flush=True)
      try:
        record = run_program(commands[name], timeout_s=options.timeout_s)
        if name != _OURS:
          read = {"part": options.part, "shape": options.shape}
          record = {"medians": read_numbers(record, **read)}
        numbers[name].append(record["medians"])
      except InputError as error:
        errors[name] = str(error)
        del numbers[name]
  if _OURS in errors:
    raise RuntimeError(f"our own measurement failed: {errors[_OURS]}")
  joined = {name: _join(rows) for name, rows in numbers.items()}
  mine = joined.pop(_OURS)
  ratio = lambda other: speed_ratios(mine["medians"], other["medians"])
  ratios = {name: ratio(other) for name, other in joined.items()}
  return mine | {"ratios": ratios, "peers": joined, "errors": errors}


def _join(rounds: Sequence[Numbers]) -> dict[str, Any]:
  """Returns `summarize` over rounds, for the keys that every round has."""
  shared = [key for key in rounds[0] if all(key in row for row in rounds)]
  return summarize({key: [row[key] for row in rounds] for key in shared})
