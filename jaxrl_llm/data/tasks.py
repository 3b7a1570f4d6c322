"""Built-in tasks: arithmetic that small models can learn, with exact checks.

`chain_sum` asks for a running sum, one step at a time:

  7+5+8-3?  ->  7+5=12;12+8=20;20-3=17;#17.

`sums` is the addition of two numbers for language models: `47+38=` -> `85`.
Both are random-access sources of `Example`; the example at an index depends
only on the settings and the index.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

CHARACTERS = "0123456789+-=?;#."  # The alphabet of chain_sum.
MAX_TOTAL = 99
_EVAL_SEED = 20250407  # Fixed: evaluation does not depend on training seeds.
_TRAIN_STREAM, _EVAL_STREAM = 0, 1
# Minimum number of operations of evaluation problems. Shorter problems are few,
# and holding them out would remove them from training.
_EVAL_OPS = 3
_MOST_OPS, _MOST_HELD_OUT = 1000, 100_000


@dataclasses.dataclass(frozen=True)
class Example:
  """A question with its verified answer."""

  id: str  # Unique within its source.
  question: str
  answer: str  # Reference answer for the reward.
  source: str  # Data source, by which metrics are grouped.
  # A conversation whose last message is the question.
  messages: Sequence[Mapping[str, str]] | None = None
  # All columns of the row, for the reward.
  columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Demonstrated response that SFT trains on, as text or messages; or None.
  completion: Any = None
  alternatives: tuple[str, ...] = ()  # Further answers that are right.
  # Messages after the question; chat templates render all of them, and the
  # opening of the model's next turn only if the last is not the model's.
  said: Sequence[Mapping[str, Any]] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt(Example):
  """An example with its prompt tokens."""

  example_id: int  # Row of the data.
  group_id: int  # Unique per draw: a prompt drawn twice is two groups.
  tokens: tuple[int, ...]
  text: str = ""  # The decoded tokens, for rewards and display.
  tries: int = 0  # Size of its group; 0 is data.group_size.
  opening: tuple[int, ...] = ()  # Given tokens that its responses begin with.
  # Which opening tokens carry loss; if set, the opening is the full response.
  demonstrated: tuple[bool, ...] = ()


class Problem:
  """A calculation in steps; hashable.

  Attributes:
    terms: the first number, then the number that each step adds.
    question: text of the question.
  """

  terms: tuple[int, ...]
  question: str

  @property
  def totals(self) -> tuple[int, ...]:
    """Running totals, including the first term."""
    return tuple(itertools.accumulate(self.terms))

  @property
  def operations(self) -> int:
    """Number of steps of the clean solution."""
    return len(self.terms) - 1

  @property
  def answer(self) -> str:
    return str(self.totals[-1])

  @property
  def lines(self) -> list[str]:
    """Steps of the clean solution, without its answer."""
    steps = zip(self.totals, self.terms[1:], self.totals[1:])
    return [f"{before}{term:+d}={after};" for before, term, after in steps]

  @property
  def solution(self) -> str:
    """The clean solution: every step, then the answer."""
    return "".join(self.lines) + f"#{self.answer}."


@dataclasses.dataclass(frozen=True)
class ChainProblem(Problem):
  """A running sum of signed terms; the first one is positive."""

  terms: tuple[int, ...]

  @property
  def question(self) -> str:
    return str(self.terms[0]) + "".join(f"{t:+d}" for t in self.terms[1:]) + "?"


def draw_problem(
  rng: np.random.Generator, *, min_ops: int, max_ops: int
) -> ChainProblem:
  """Draws a running sum.

  The number of operations is uniform in [min_ops, max_ops], and operands are
  uniform in 1..9 with random signs; a step that would leave 0..99 is redrawn.

  Args:
    rng: source of randomness; advanced.
    min_ops: minimum number of operations, at least 1.
    max_ops: maximum number of operations.

  Returns:
    The problem.
  """
  operations = int(rng.integers(min_ops, max_ops + 1))
  total = int(rng.integers(1, 10))
  terms = [total]
  while len(terms) <= operations:
    code = int(rng.integers(18))
    term = code - 9 if code < 9 else code - 8  # -9..-1, 1..9
    if 0 <= total + term <= MAX_TOTAL:
      terms.append(term)
      total += term
  return ChainProblem(terms=tuple(terms))


def _example(
  task: str, split: str, index: int, question: str, answer: str
) -> Example:
  return Example(f"{task}-{split}-{index}", question, answer, f"{task}/{split}")


def _check_split(split: str) -> None:
  if split not in ("train", "eval"):
    raise ValueError(f"split must be 'train' or 'eval', got {split!r}")


class DrawnProblems:
  """Random-access source of random problems, some of them held out.

  The evaluation split is a fixed list of distinct problems, the same for every
  seed, with at least three operations (or `max_ops`, if lower). It is disjoint
  from the training split: an index that draws one of its problems redraws.
  """

  def __init__(
    self,
    name: str,
    draw: Callable[..., Problem],
    settings: Mapping[str, float],
    *,
    split: str = "train",
    seed: int = 0,
    eval_size: int = 200,
  ):
    """Chooses a split.

    Args:
      name: name of the task, for the ids of its examples.
      draw: (rng, **settings) -> problem.
      settings: settings of `draw`; one of them is max_ops, the maximum number
        of operations.
      split: 'train' (endless) or 'eval' (`eval_size` fixed problems).
      seed: seed of the training problems; evaluation does not depend on it.
      eval_size: number of evaluation problems.

    Raises:
      ValueError: a setting is out of range.
    """
    _check_split(split)
    self._name, self._split, self._seed = name, split, seed
    self._draw = functools.partial(draw, **settings)
    self._eval = _eval_problems(draw, eval_size, **settings)
    self._held_out = frozenset(problem.question for problem in self._eval)

  def __len__(self) -> int:
    return len(self._eval) if self._split == "eval" else 2**31 - 1

  def __getitem__(self, index: int) -> Example:
    problem = self.problem(index)
    example = _example(
      self._name, self._split, index, problem.question, problem.answer
    )
    return dataclasses.replace(example, completion=problem.solution)

  def problem(self, index: int) -> Problem:
    """Returns the problem at `index`."""
    index = range(len(self))[index]  # Raises IndexError if out of range.
    if self._split == "eval":
      return self._eval[index]
    rng = np.random.default_rng((self._seed, _TRAIN_STREAM, index))
    while True:
      problem = self._draw(rng)
      if problem.question not in self._held_out:
        return problem


@functools.cache
def _eval_problems(
  draw: Callable[..., Problem], size: int, **settings: float
) -> tuple[Problem, ...]:
  if not 1 <= size <= _MOST_HELD_OUT:
    raise ValueError(f"eval_size must be in 1..{_MOST_HELD_OUT}, got {size}")
  rng = np.random.default_rng((_EVAL_SEED, _EVAL_STREAM))
  fewest = min(_EVAL_OPS, settings["max_ops"])
  found = {}
  for _ in range(100 * size):
    problem = draw(rng, **settings)
    if problem.operations < fewest or problem in found:
      continue
    if len(found) == size:  # One more exists, so training has a problem.
      return tuple(found)
    found[problem] = None
  shown = ", ".join(f"{k}={v}" for k, v in settings.items())
  raise ValueError(
    f"eval_size={size} is too large: with {shown} only {len(found)} distinct"
    f" problems of {fewest} or more operations were found, and training needs"
    " at least one more than evaluation"
  )


class ChainSum(DrawnProblems):
  """Running sums to be solved step by step; see `DrawnProblems`."""

  def __init__(self, *, min_ops: int = 1, max_ops: int = 6, **source: Any):
    """Chooses a split.

    Args:
      min_ops: minimum number of operations, at least 1.
      max_ops: maximum number of operations.
      **source: split, seed and eval_size of `DrawnProblems`.

    Raises:
      ValueError: a setting is out of range.
    """
    whole = type(min_ops) is int and type(max_ops) is int
    if not (whole and 1 <= min_ops <= max_ops <= _MOST_OPS):
      raise ValueError(
        f"need integers 1 <= min_ops <= max_ops <= {_MOST_OPS}, got"
        f" min_ops={min_ops}, max_ops={max_ops}"
      )
    settings = {"max_ops": max_ops, "min_ops": min_ops}
    super().__init__("chain_sum", draw_problem, settings, **source)


def sums(
  *,
  split: str = "train",
  seed: int = 0,
  digits: int = 2,
  eval_size: int | None = None,
) -> list[Example]:
  """Makes two-number additions: `47 + 38 =` -> `85`.

  The problems are all pairs of numbers with the given number of digits. In one
  fixed order, the first `eval_size` are the evaluation split and the others the
  training split.

  Args:
    split: 'train' or 'eval'.
    seed: seed of the training split's order; evaluation does not depend on it.
    digits: 1 (numbers 1..9) or 2 (10..99).
    eval_size: number of evaluation problems; None means 200, or 20 of the 81
      one-digit problems.

  Raises:
    ValueError: a setting is out of range.
  """
  _check_split(split)
  if digits not in (1, 2):
    raise ValueError(f"digits must be 1 or 2, got {digits}")
  numbers = range(10 ** (digits - 1), 10**digits)
  pairs = list(itertools.product(numbers, numbers))
  size = (20, 200)[digits - 1] if eval_size is None else eval_size
  if not 1 <= size < len(pairs):
    raise ValueError(f"eval_size must be in 1..{len(pairs) - 1}, got {size}")
  order = np.random.default_rng(_EVAL_SEED).permutation(len(pairs))
  if split == "eval":
    order = order[:size]
  else:
    order = np.random.default_rng(seed).permutation(order[size:])
  return [
    _example("sums", split, index, f"{left} + {right} =", str(left + right))
    for index, (left, right) in enumerate(pairs[i] for i in order)
  ]
