"""Inputs and results of reward functions, and their failures."""

import dataclasses
import inspect
import numbers
import pathlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Reward function; see `arguments` for its inputs and `as_verdict` for its
# results.
RewardFn = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The verdict of a reward on one response.

  If the reward failed, there is no verdict: `error` gives the reason, and the
  response does not count as wrong.
  """

  # None: whether `value`, or with parts the part 'right', else the first part,
  # exceeds the threshold.
  correct: bool | None
  extracted: str | None = None  # Answer found in the response.
  error: str | None = None  # 'timeout', 'crash' or 'error: ...'.
  value: float | None = None  # None: reward.correct or reward.incorrect.
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  # Logged as `reward/NAME`, but no part of the reward.
  logged: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Grading(NamedTuple):
  """The conversion of numbers to verdicts.

  Attributes:
    weights: weights of parts, by name; 1 for parts that are not named.
    threshold: a response is correct if its value, or the deciding part, exceeds
      this.
  """

  weights: Mapping[str, float] = {}
  threshold: float = 0.5

  def value(self, parts: Mapping[str, float]) -> float:
    """Returns the weighted sum of parts."""
    return sum(self.weights.get(k, 1.0) * x for k, x in parts.items())


PLAIN = Grading()
_LARGEST = 2.0**127  # Rewards are stored as float32.


def arguments(fn: RewardFn, known: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keyword arguments of a function, matched by their names.

  Args:
    fn: the function; `**columns` receives all columns that it does not name.
    known: values by name; `columns` is the row of the data, whose columns are
      also available by name, unless another value has that name.

  Raises:
    TypeError: An argument without a default matches no value.
  """
  columns, given = known["columns"], {}
  values = {**columns, **known}
  for p in inspect.signature(fn).parameters.values():
    if p.kind is p.VAR_KEYWORD:
      given = {name: values[name] for name in columns} | given
    elif p.name in values:
      given[p.name] = values[p.name]
    elif p.default is p.empty and p.kind is not p.VAR_POSITIONAL:
      names = ", ".join(map(repr, columns)) or "none"
      raise TypeError(f"it reads {p.name!r}, but the columns are {names}")
  return given


def as_verdict(result: Any, grading: Grading = PLAIN) -> Verdict:
  """Converts the result of a reward to a verdict.

  Args:
    result: a verdict, a bool (whether the response is correct), a number (the
      reward), or a mapping from names of parts to numbers, whose weighted sum
      is the reward; the part 'right', or else the first part, then decides
      whether the response is correct.
    grading: weights and threshold.

  Raises:
    TypeError: The result, or a number in it, has another type.
    ValueError: A number is not finite.
  """
  result = scalar(result)
  if isinstance(result, bool):
    return Verdict(result)
  if isinstance(result, Mapping):
    result = Verdict(None, parts=result)
  elif not isinstance(result, Verdict):
    result = Verdict(None, value=number(result, "the reward"))
  parts = {str(k): number(x, f"part {k!r}") for k, x in result.parts.items()}
  value = decides = result.value
  if value is None and parts:
    value = grading.value(parts)
    decides = parts.get("right", next(iter(parts.values())))
  if value is not None:
    value = number(value, "the reward")
  correct = scalar(result.correct)
  if correct is None and value is not None:
    correct = decides > grading.threshold
  if not isinstance(correct, bool):
    raise TypeError(f"Verdict.correct is {correct!r}; give True or False")
  error = result.error or None  # An empty text is no error.
  if not isinstance(error, str | None):
    raise TypeError(f"Verdict.error is {error!r}; give a text or None")
  extracted = None if result.extracted is None else str(result.extracted)
  logged = {str(k): number(x, f"{k!r}") for k, x in result.logged.items()}
  return Verdict(correct, extracted, error, value, parts, logged)


def number(value: Any, what: str) -> float:
  """Converts a value to a float.

  Raises:
    TypeError: The value is not a number.
    ValueError: The number is not finite.
  """
  value = scalar(value)
  if not isinstance(value, numbers.Real):
    raise TypeError(f"{what} is {repr(value)[:40]}; give a number")
  if not abs(value) < _LARGEST:
    raise ValueError(f"{what} is {value}; give a finite number")
  return float(value)


def scalar(value: Any) -> Any:
  """Returns the Python value of an array with one element."""
  return value.item() if hasattr(value, "item") else value


def failure(error: Exception) -> str:
  """Describes the exception of a reward, and where it was raised."""
  text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
  return f"error: {text}{_at(error)}"


def _at(error: Exception) -> str:
  """Returns the innermost line in the first file outside this package."""
  package = pathlib.Path(__file__).parents[1]
  frames = traceback.extract_tb(error.__traceback__)
  frames = [
    f for f in frames if package not in pathlib.Path(f.filename).parents
  ]
  lines = [f.lineno for f in frames if f.filename == frames[0].filename]
  if not lines:
    return ""
  return f" ({pathlib.Path(frames[0].filename).name}:{lines[-1]})"
