"""Side by side: other programs measured in the same run as ours.

A shared machine makes numbers of different days incomparable, so a ratio is
taken between programs that ran alternately, each in a fresh process. A program
reports by a JSON object at the end of its standard output. What the benchmark
programs of Tunix and TRL print is understood, and so are flat objects with our
own keys (`tokens_per_s`, `step_s`, `update_s`, ...).
"""

import importlib.metadata
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import InputError

Numbers = dict[str, float]

# What a part compares. `*_per_s` is better when larger, all else when smaller.
COMPARED = {
  "sampler": ("tokens_per_s", "best_tokens_per_s"),
  "train_step": (
    "step_s",
    "best_step_s",
    "generate_s",
    "update_s",
    "update_tokens_per_s",
    "peak_rss_gib",
  ),
  "estimators": ("gae_s", "group_relative_s", "length_adaptive_lambda_s"),
}
# Other spellings of a key and the factor to our unit, most specific first: a
# program may use one word for a part of its step and for something else.
_SPELLINGS = {
  "tokens_per_s": (
    ("sampler.tokens_per_s", 1.0),
    ("generate_tokens_per_s", 1.0),
  ),
  "best_tokens_per_s": (
    ("sampler.best_tokens_per_s", 1.0),
    ("generate_best_tokens_per_s", 1.0),
  ),
  "step_s": (("grpo.step_s", 1.0), ("grpo_step_s", 1.0)),
  "best_step_s": (("grpo.best_step_s", 1.0), ("grpo_best_step_s", 1.0)),
  "generate_s": (("grpo.rollout_s", 1.0), ("grpo_generation_s", 1.0)),
  "update_s": (("grpo.update_s", 1.0), ("grpo_train_s", 1.0)),
  "update_tokens_per_s": (("fwd_bwd_tokens_per_s", 1.0),),
  # Counted by 2^20 KiB, whatever its name says.
  "peak_rss_gib": (("peak_rss_gb", 1.0), ("peak_rss_mib", 1 / 1024)),
}
_SHAPE_NAMES = {
  "tiny": ("tiny",),
  "smollm2-135m": ("smollm2-135m", "smollm2", "smollm135m"),
}
_PACKAGES = ("jaxrl_llm", "jax", "jaxlib", "numpy")


def summarize(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
  """Medians and spread of repeated measurements.

  Args:
    samples: name -> its values, at least one.

  Returns:
    `{'medians': {name: median}, 'spread': {name: [least, most]}}`.
  """
  return {
    "medians": {k: statistics.median(v) for k, v in samples.items()},
    "spread": {k: [min(v), max(v)] for k, v in samples.items()},
  }


def speed_ratios(ours: Numbers, other: Numbers) -> Numbers:
  """How many times better ours is, for every key that both have.

  Args:
    ours: rates end in `_per_s`; all others are seconds or memory.
    other: the same keys of the other program.

  Returns:
    ours / other of a rate, other / ours of the rest: over 1, ours is better.
  """
  return {
    key: ours[key] / other[key]
    if key.endswith("_per_s")
    else other[key] / ours[key]
    for key in other
    if key in ours
  }


def last_json_object(text: str) -> dict[str, Any] | None:
  """The last JSON object of an output, on one line or over many.

  An object begins at the start of a line, and nothing but blanks follows it on
  its last line. None if there is no such object.
  """
  decoder = json.JSONDecoder()
  start = len(text)
  while start > 0:
    start = text.rfind("\n", 0, start - 1) + 1 if start > 1 else 0
    if text[start : start + 1] == "{":
      try:
        value, end = decoder.raw_decode(text, start)
      except (ValueError, RecursionError):
        continue
      if not text[end:].split("\n", 1)[0].strip():
        return value
  return None


def read_numbers(
  record: Mapping[str, Any], *, part: str, shape: str
) -> Numbers:
  """What a program measured, under our keys and in our units.

  Args:
    record: the JSON object it printed.
    part: a key of `COMPARED`.
    shape: the shape we measure; a program that names its own must agree.

  Returns:
    The keys of the part that the program has, at least one.

  Raises:
    InputError: another shape, none of the keys, or not a positive number.
  """
  record = _of_shape(record, shape)
  numbers = {}
  for key in COMPARED[part]:
    for name, factor in (*_SPELLINGS.get(key, ()), (key, 1.0)):
      value = _at(record, name)
      if value is None:
        continue
      if not _is_positive(value):
        raise InputError(f"its {name} is {value!r}, not a positive number")
      numbers[key] = value * factor
      break
  if not numbers:
    raise InputError(
      f"its JSON object has none of {', '.join(COMPARED[part])}"
    )
  return numbers


def _of_shape(record: Mapping[str, Any], shape: str) -> Mapping[str, Any]:
  """The part of a record that is about a shape, several rounds joined."""
  names = _SHAPE_NAMES[shape]
  results = record.get("results")
  if not isinstance(results, Mapping):
    if record.get("shape", shape) not in names:
      raise InputError(f"it measured shape {record['shape']!r}, not {shape!r}")
    return record
  found = next((results[name] for name in names if name in results), None)
  if not isinstance(found, Mapping):
    raise InputError(f"it measured {sorted(results)}, not {shape!r}")
  found = found.get("trl", found)
  if not isinstance(found, list):
    return found
  samples = {}
  for row in found:
    for key, value in row.items():
      if _is_positive(value):
        samples.setdefault(key, []).append(value)
  return {key: statistics.median(values) for key, values in samples.items()}


def _at(record: Mapping[str, Any], path: str) -> Any:
  for name in path.split("."):
    if not isinstance(record, Mapping) or name not in record:
      return None
    record = record[name]
  return record


def _is_positive(value: Any) -> bool:
  return type(value) in (int, float) and math.isfinite(value) and value > 0


def run_program(
  command: str | Sequence[str], *, timeout_s: float
) -> dict[str, Any]:
  """Runs a program and returns the last JSON object of its output.

  Args:
    command: a shell command, or the arguments of one.
    timeout_s: seconds after which it is killed, children included.

  Raises:
    InputError: it failed, took too long or printed no JSON object.
  """
  process = subprocess.Popen(
    command,
    shell=isinstance(command, str),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    errors="replace",
    start_new_session=True,
  )
  try:
    output, errors = process.communicate(timeout=timeout_s)
  except subprocess.TimeoutExpired:
    raise InputError(f"took more than {timeout_s:g} s") from None
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()
  if process.returncode:
    last = next(iter(errors.strip().splitlines()[-1:]), "no error output")
    raise InputError(f"exit code {process.returncode}: {last}")
  record = last_json_object(output)
  if record is None:
    raise InputError("printed no JSON object at the end of its output")
  return record


def alternate(
  programs: Mapping[str, Callable[[], Numbers]], *, rounds: int
) -> tuple[dict[str, list[Numbers]], dict[str, str]]:
  """Measures programs in turn: A B, B A, A B, ...

  Args:
    programs: name -> runs it once.
    rounds: how often each one runs.

  Returns:
    name -> its numbers of every round, and name -> error of those that raised
    `InputError`; such a program is not run again and has no numbers.
  """
  numbers, errors = {name: [] for name in programs}, {}
  for i in range(rounds):
    for name in list(programs) if i % 2 == 0 else list(programs)[::-1]:
      if name in errors:
        continue
      try:
        numbers[name].append(programs[name]())
      except InputError as error:
        errors[name] = str(error)
  return {k: v for k, v in numbers.items() if k not in errors}, errors


def join_rounds(rounds: Sequence[Numbers]) -> dict[str, Any]:
  """`summarize` over rounds, of the keys that every round has."""
  shared = [key for key in rounds[0] if all(key in row for row in rounds)]
  return summarize({key: [row[key] for row in rounds] for key in shared})


def wait_until_idle(seconds: float) -> bool:
  """Waits until the load of a minute is low, at most so many seconds.

  Returns:
    Whether the machine is quiet: a load of a quarter of its CPUs.
  """
  limit = max(0.25 * (os.cpu_count() or 1), 0.3)
  end = time.monotonic() + seconds
  while os.getloadavg()[0] > limit:
    left = end - time.monotonic()
    if left <= 0:
      return False
    time.sleep(min(5.0, left))
  return True


def describe_machine() -> dict[str, Any]:
  """Processor and software, for a number to mean something later."""
  versions = {"python": platform.python_version()}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = "not installed"
  return {
    "machine": {
      "system": platform.platform(),
      "processor": _processor(),
      "cpus": os.cpu_count(),
    },
    "versions": versions,
  }


def _processor() -> str:
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
      names = (line.split(":", 1) for line in file if ":" in line)
      return next(v.strip() for k, v in names if k.strip() == "model name")
  except (OSError, StopIteration):
    return platform.processor()
