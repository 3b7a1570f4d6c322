"""The task `remainder`: division by repeated subtraction.

  31-9?  ->  31-9=22;22-9=13;13-9=4;#4.

The answer is the first number below the divisor. A step depends only on the
step before it, so that a small model can write hundreds of tokens without a
mistake. The number of steps, and so the length of responses, is long-tailed:
most are short, a few are very long.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxrl_llm.data import tasks

_LARGEST = 99  # A small model learns to subtract two digits without errors.
_DIVISORS = range(3, 10)  # With 2, guesses are right too often.
_MOST_OPS = (_LARGEST + 1) // _DIVISORS[0] - 1  # Allows every remainder.


@dataclasses.dataclass(frozen=True)
class RemainderProblem(tasks.Problem):
  """Division by repeated subtraction; the answer is the remainder."""

  number: int
  divisor: int

  @property
  def terms(self) -> tuple[int, ...]:
    return (self.number, *[-self.divisor] * (self.number // self.divisor))

  @property
  def question(self) -> str:
    return f"{self.number}-{self.divisor}?"


def draw_problem(
  rng: np.random.Generator, *, max_ops: int, tail: float
) -> RemainderProblem:
  """Draws a division with quotient n, P(n) ∝ n^-tail.

  The divisor is uniform among those of 3..9 that keep the number below 100,
  and the remainder is uniform in 0..divisor - 1.

  Args:
    rng: source of randomness; advanced.
    max_ops: largest n.
    tail: exponent; 0 is uniform, larger values give shorter problems.

  Returns:
    The problem.
  """
  shares = np.arange(1, max_ops + 1) ** -float(tail)
  operations = 1 + int(rng.choice(max_ops, p=shares / shares.sum()))
  # With any remainder, the number is below divisor * (operations + 1).
  most = min(_DIVISORS[-1], (_LARGEST + 1) // (operations + 1))
  divisor = int(rng.choice(range(_DIVISORS[0], most + 1)))
  left = int(rng.integers(divisor))
  return RemainderProblem(operations * divisor + left, divisor)


class Remainder(tasks.DrawnProblems):
  """Divisions with long-tailed quotients; see `DrawnProblems`."""

  def __init__(self, *, max_ops: int = 32, tail: float = 1.1, **source: Any):
    """Chooses a split.

    Args:
      max_ops: maximum number of subtractions, n; at most 32.
      tail: P(n) ∝ n^-tail.
      **source: split, seed and eval_size of `DrawnProblems`.

    Raises:
      ValueError: a setting is out of range.
    """
    if not 1 <= max_ops <= _MOST_OPS:
      raise ValueError(f"max_ops must be in 1..{_MOST_OPS}, got {max_ops}")
    if not 0 <= tail <= 10:
      raise ValueError(f"tail must be in [0, 10], got {tail}")
    settings = {"max_ops": max_ops, "tail": tail}
    super().__init__("remainder", draw_problem, settings, **source)
