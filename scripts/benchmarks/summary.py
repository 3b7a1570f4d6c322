"""Summarizes measurements: medians, spread, ratios, and the machine."""

import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jaxrl_llm

Numbers = dict[str, float]

_PACKAGES = ("jax", "jaxlib", "numpy")


class Timed(dict[str, list[float]]):
  """Seconds of timed calls, by name."""

  def __call__(self, name: str, call: Callable[..., Any], *arguments) -> Any:
    """Records the seconds of a call; returns its result."""
    start = time.perf_counter()
    result = call(*arguments)
    self.setdefault(name, []).append(time.perf_counter() - start)
    return result


def summarize(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
  """Returns medians and spread of repeated measurements.

  Args:
    samples: name -> values, at least one.

  Returns:
    `{'medians': {name: median}, 'spread': {name: [minimum, maximum]}}`.
  """
  return {
    "medians": {k: statistics.median(v) for k, v in samples.items()},
    "spread": {k: [min(v), max(v)] for k, v in samples.items()},
  }


def speed_ratios(ours: Numbers, other: Numbers) -> Numbers:
  """Returns our speed-up for every common key.

  Args:
    ours: our numbers; keys of rates end in `_per_s`, all others are seconds or
      memory.
    other: numbers of the other program by the same keys.

  Returns:
    ours / other for rates, other / ours for the rest: above 1, ours is better.
  """
  ratios = {key: ours[key] / other[key] for key in other if key in ours}
  rate = lambda key: key.endswith("_per_s")
  return {key: x if rate(key) else 1 / x for key, x in ratios.items()}


def show(record: Mapping[str, Any]) -> None:
  """Prints a record as readable rows, then as JSON in the last line."""
  for key, median in record["medians"].items():
    low, high = record["spread"][key]
    print(f"{key:30} {median:>12,.4g}   [{low:,.4g} .. {high:,.4g}]")
  for name, ratios in record["ratios"].items():
    peer = record["peers"].get(name, {"medians": {}})["medians"]
    for key, ratio in ratios.items():
      theirs = f" ({peer[key]:,.4g})" if key in peer else ""
      print(f"{key:30} {ratio:>12,.2f}   times as good as {name}{theirs}")
  print(json.dumps(record), flush=True)


def wait_until_idle(seconds: float) -> None:
  """Waits at most so many seconds until a quarter of the CPUs is busy."""
  limit = max(0.25 * (os.cpu_count() or 1), 0.3)
  end = time.monotonic() + seconds
  while os.getloadavg()[0] > limit and (left := end - time.monotonic()) > 0:
    time.sleep(min(5.0, left))


def describe_machine() -> dict[str, Any]:
  """Returns processor and versions, which numbers are recorded with."""
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {
    "machine": {
      "system": platform.platform(),
      "processor": _processor(),
      "cpus": os.cpu_count(),
    },
    "versions": {
      "jaxrl_llm": jaxrl_llm.__version__,
      "python": platform.python_version(),
      **versions,
    },
  }


def _processor() -> str:
  file = pathlib.Path("/proc/cpuinfo")
  text = file.read_text("utf-8") if file.exists() else ""
  found = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
  return found[1].strip() if found else platform.processor()
