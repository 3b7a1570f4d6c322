"""The task `remainder`: division by taking the divisor away again and again.

  31-9?  ->  31-9=22;22-9=13;13-9=4;#4.

The answer is the first number below the divisor. A line depends on the line
before it alone, so a small model can write hundreds of tokens without a
mistake. The number of lines has a long tail, and so has the length of
responses: most are short, a few are very long.
"""

import dataclasses

import numpy as np

from jaxrl_llm.data import tasks

_LARGEST = 99  # Two digits: a small model learns their subtraction for good.
_DIVISORS = range(3, 10)  # Of 2 a guess is right too often.
_MOST_OPS = (_LARGEST + 1) // _DIVISORS[0] - 1  # With every remainder.


@dataclasses.dataclass(frozen=True)
class RemainderProblem:
  """What is left of a number when a divisor is taken away while it can be."""

  number: int
  divisor: int

  @property
  def operations(self) -> int:
    """Subtractions of the clean solution."""
    return self.number // self.divisor

  @property
  def question(self) -> str:
    return f"{self.number}-{self.divisor}?"

  @property
  def answer(self) -> str:
    return str(self.number % self.divisor)

  @property
  def solution(self) -> str:
    """The clean countdown: every line, then the answer."""
    return "".join(_lines(self.number, self.divisor)) + f"#{self.answer}."


def _lines(number: int, divisor: int) -> list[str]:
  numbers = range(number, divisor - 1, -divisor)
  return [f"{n}-{divisor}={n - divisor};" for n in numbers]


def longest_solution(max_ops: int) -> int:
  """Returns the characters of the longest clean remainder solution."""
  divisor = _divisors(max_ops)[-1]
  number = (max_ops + 1) * divisor - 1
  return len(RemainderProblem(number, divisor).solution)


def _divisors(operations: int) -> range:
  """Those with which no number of so many lines is over the largest."""
  most = (_LARGEST + 1) // (operations + 1)
  return range(_DIVISORS[0], min(_DIVISORS[-1], most) + 1)


def draw_problem(
  rng: np.random.Generator, *, max_ops: int, tail: float
) -> RemainderProblem:
  """Draws a division with quotient n, P(n) ∝ n^-tail.

  The divisor is uniform among those of 3..9 that keep the number below 100,
  the remainder in 0..divisor - 1.

  Args:
    rng: source of randomness; advanced.
    max_ops: largest n.
    tail: exponent; 0 is uniform, larger is shorter.

  Returns:
    The problem.
  """
  shares = np.arange(1, max_ops + 1) ** -float(tail)
  operations = 1 + int(rng.choice(max_ops, p=shares / shares.sum()))
  divisor = int(rng.choice(_divisors(operations)))
  left = int(rng.integers(divisor))
  return RemainderProblem(operations * divisor + left, divisor)


class Remainder(tasks.DrawnProblems):
  """Divisions with a long tail of quotients; see `DrawnProblems`."""

  def __init__(
    self,
    *,
    split: str = "train",
    seed: int = 0,
    max_ops: int = 32,
    tail: float = 1.1,
    eval_size: int = 200,
  ):
    """Chooses a split.

    Args:
      split: 'train' (endless) or 'eval' (`eval_size` fixed problems).
      seed: chooses the training problems; evaluation does not depend on it.
      max_ops: most subtractions, n; at most 32.
      tail: P(n) ∝ n^-tail.
      eval_size: number of evaluation problems.

    Raises:
      ValueError: a setting is out of range.
    """
    if not 1 <= max_ops <= _MOST_OPS:
      raise ValueError(f"max_ops must be in 1..{_MOST_OPS}, got {max_ops}")
    if not 0 <= tail <= 10:
      raise ValueError(f"tail must be in [0, 10], got {tail}")
    super().__init__(
      "remainder",
      draw_problem,
      split=split,
      seed=seed,
      eval_size=eval_size,
      max_ops=max_ops,
      tail=tail,
    )


def noisy_solution(
  rng: np.random.Generator,
  problem: RemainderProblem,
  *,
  max_length: int,
  direct: float = 0.38,
  clean: float = 0.36,
  slip: float = 0.14,
  early: float = 0.09,
  stuck: float = 0.03,
  direct_right: float = 0.25,
) -> tasks.Solution:
  """Writes a solution of the kind a careless crowd would write.

  What goes wrong is chosen once per solution, not per line: otherwise mistakes
  would compound and long problems would hardly ever come out right.

  Args:
    rng: source of randomness; advanced.
    problem: what is to be solved.
    max_length: characters after which a solution that never stops is cut.
    direct: share of bare guesses `#N.`.
    clean: share of clean countdowns.
    slip: share of countdowns with one wrong line, carried on to the answer.
    early: share of countdowns that end too early, with too large an answer.
    stuck: share of countdowns that repeat a line and never stop.
    direct_right: share of the guesses that are right.

  Returns:
    The text, and whether it ends.

  Raises:
    ValueError: the five shares are negative or do not sum to 1.
  """
  shares = (direct, clean, slip, early, stuck)
  if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
    raise ValueError(
      "direct, clean, slip, early, stuck must be >= 0 and sum to 1, got"
      f" {', '.join(map(str, shares))}"
    )
  kind = int(rng.choice(len(shares), p=np.divide(shares, sum(shares))))
  if kind == 1:
    return tasks.Solution(problem.solution, True)
  if kind == 4:
    lines = _lines(problem.number, problem.divisor)
    last = int(rng.integers(len(lines)))
    text = "".join(lines[:last]) + lines[last] * max_length
    return tasks.Solution(text[:max_length], False)
  if kind == 0:
    return tasks.Solution(_guess(rng, problem, right=direct_right), True)
  return tasks.Solution((_slip if kind == 2 else _early)(rng, problem), True)


def _guess(
  rng: np.random.Generator, problem: RemainderProblem, *, right: float
) -> str:
  offset = 0
  if rng.random() >= right:
    offset = int(rng.integers(1, problem.divisor))
  return f"#{(problem.number + offset) % problem.divisor}."


def _slip(rng: np.random.Generator, problem: RemainderProblem) -> str:
  lines = _lines(problem.number, problem.divisor)
  line = int(rng.integers(len(lines)))
  before = problem.number - line * problem.divisor
  left = before - problem.divisor
  offsets = [
    offset
    for offset in (-10, -2, -1, 1, 2, 10)
    if left + offset >= 0 and offset % problem.divisor
  ]
  left += offsets[int(rng.integers(len(offsets)))]
  wrong = f"{before}-{problem.divisor}={left};"
  rest = _lines(left, problem.divisor)
  answer = left % problem.divisor
  return "".join([*lines[:line], wrong, *rest]) + f"#{answer}."


def _early(rng: np.random.Generator, problem: RemainderProblem) -> str:
  kept = int(rng.integers(problem.operations))  # Lines, fewer than all.
  lines = _lines(problem.number, problem.divisor)[:kept]
  return "".join(lines) + f"#{problem.number - kept * problem.divisor}."
