"""Adapters for verl and TRL reward functions, and for group rewards.

A file with verl or TRL functions is imported by its path, also in workers. A
verl function is called with one response at a time, so that a response that
makes it hang affects no other. A TRL function is called with all responses of a
group, which it may compare.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.verdict import (
  Verdict,
  arguments,
  failure,
  number,
  scalar,
)
from jaxrl_llm.system import plugin


@functools.cache
def load_function(path: str, name: str) -> Callable[..., Any]:
  """Loads a function of a file by name.

  Raises:
    InputError: The file or the function does not exist, or the file raises.
  """
  module = vars(plugin.load(path))
  if not callable(module.get(name)):
    own = [key for key, value in module.items() if inspect.isfunction(value)]
    raise InputError(
      f"{path} has no function {name!r}; set reward.function to one of"
      f" {', '.join(own) or 'the functions in it'}"
    )
  return module[name]


def _call(fn: Callable[..., Any], **given: Any) -> Any:
  """Calls a function; both libraries also accept `async` ones."""
  result = fn(**given)
  if not inspect.iscoroutine(result):
    return result
  # In a notebook, the main thread already runs an event loop.
  with concurrent.futures.ThreadPoolExecutor(1) as threads:
    return threads.submit(asyncio.run, result).result()


@dataclasses.dataclass(frozen=True)
class _OfFile:
  """Base class of the adapters: functions of a file."""

  path: str
  functions: tuple[str, ...]

  def loaded(self) -> list[Callable[..., Any]]:
    """Returns the functions."""
    return [load_function(self.path, name) for name in self.functions]

  def prepare(self) -> None:
    """Imports the file once per worker, not for every response."""
    self.loaded()


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Wraps a group reward as a batched reward."""

  fn: Callable[[list[str], list[Verdict]], Sequence[Any]]
  batched = True

  def __call__(
    self, texts: list[str], verdicts: list[Sequence[Any]]
  ) -> Sequence[Any]:
    return self.fn(texts, [Verdict(*verdict) for verdict in verdicts])


class Verl(_OfFile):
  """verl's `f(data_source, solution_str, ground_truth, extra_info)`.

  The function returns a number, or a mapping with the number `score`, whose
  other numbers are parts of the reward; a bool `acc` tells whether the response
  is correct, and a string `pred` is the extracted answer. There is exactly one
  function.
  """

  def __call__(
    self, response: str, answer: str, source: str, columns: Mapping[str, Any]
  ) -> Verdict:
    (name,) = self.functions
    model = columns.get("reward_model")
    known = model if isinstance(model, Mapping) else {}
    result = _call(
      load_function(self.path, name),
      data_source=columns.get("data_source") or source,
      solution_str=response,
      ground_truth=known.get("ground_truth", answer),
      extra_info=columns.get("extra_info") or {},
    )
    if not isinstance(result, Mapping):
      return Verdict(None, value=number(result, f"what {name} returned"))
    if "score" not in result:
      raise TypeError(f"{name} returned {list(result)}, without a 'score'")
    result = dict(result)
    if "acc" in result:
      result["acc"] = scalar(result["acc"])  # NumPy bools are not bools.
    right, found = result.get("acc"), result.get("pred")
    return Verdict(
      correct=right if isinstance(right, bool) else None,
      extracted=found if isinstance(found, str) else None,
      value=number(result["score"], "'score'"),
      parts={
        key: value
        for key, value in result.items()
        if key != "score" and isinstance(value, numbers.Real)
      },
    )


class Trl(_OfFile):
  """TRL's `f(prompts, completions, **columns) -> list`, one or several.

  Each function is a part of the reward under its name; a result of None means
  that it does not apply to a response. As in TRL, the completion of a
  conversation is a list of messages, and `completion_ids` are the tokens. The
  `trainer_state` has only `global_step`, the version of the weights. Numbers
  given to `log_metric` and `log_extra` are logged as `reward/NAME`; texts given
  to `log_extra` are not kept.
  """

  batched = True

  @property
  def parts(self) -> tuple[str, ...]:
    """Names of the parts that a reward may have."""
    return self.functions

  def __call__(
    self,
    question: Sequence[str],
    messages: Sequence[Sequence[Mapping[str, str]] | None],
    response: Sequence[str],
    tokens: Sequence[Sequence[int]],
    columns: Sequence[Mapping[str, Any]],
    policy_version: Sequence[int] = (0,),
  ) -> list[Verdict]:
    logged: list[dict[str, float]] = [{} for _ in response]

    def log_extra(column: str, values: Sequence[Any]) -> None:
      for own, value in zip(logged, values):
        with contextlib.suppress(TypeError, ValueError):  # A text, or NaN.
          own[column] = number(value, column)

    names = [name for name in columns[0] if name != "prompt"]
    batch = {name: [row[name] for row in columns] for name in names} | {
      "prompts": [m or q for m, q in zip(messages, question)],
      "completions": [
        [{"role": "assistant", "content": r}] if m else r
        for m, r in zip(messages, response)
      ],
      "completion_ids": tokens,
      "trainer_state": types.SimpleNamespace(global_step=max(policy_version)),
      "log_extra": log_extra,
      "log_metric": lambda name, x: log_extra(name, [x] * len(logged)),
    }
    parts: list[dict[str, float]] = [{} for _ in response]
    for name in self.functions:
      fn = load_function(self.path, name)
      results = _call(fn, **arguments(fn, {"columns": batch}))
      if hasattr(results, "tolist"):  # An array, or a tensor of torch.
        results = results.tolist()
      if not isinstance(results, Sequence) or len(results) != len(parts):
        raise TypeError(
          f"{name} returned {str(results)[:40]!r}; return a list with a number"
          " for every completion"
        )
      for own, result in zip(parts, results):
        own |= {} if result is None else {name: result}
    nothing = failure(ValueError("no function gave this response a reward"))
    failed = Verdict(False, error=nothing)
    return [
      Verdict(None, parts=own, logged=more) if own else failed
      for own, more in zip(parts, logged)
    ]
