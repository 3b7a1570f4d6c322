"""The task remainder: exact countdowns, and a long tail."""

import collections
import itertools
import re

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.data import remainder, tasks


def problems(n, **settings):
  source = remainder.Remainder(**settings)
  return [source.problem(i) for i in range(n)]


def parse(text):
  """Returns the lines as (number, divisor, left), and the text after them."""
  *lines, end = text.split(";")
  matches = [re.fullmatch(r"(\d+)-(\d)=(\d+)", line) for line in lines]
  return [tuple(map(int, m.groups())) for m in matches], end


class TestRemainderProblem:
  def test_texts(self):
    problem = remainder.RemainderProblem(number=31, divisor=9)
    assert problem.question == "31-9?"
    assert problem.solution == "31-9=22;22-9=13;13-9=4;#4."
    assert (problem.answer, problem.operations) == ("4", 3)

  def test_random_problems_are_solved_line_by_line(self):
    for problem in problems(1000, seed=3):
      lines, end = parse(problem.solution)
      number, divisor = problem.number, problem.divisor
      assert 3 <= divisor <= 9 and 1 <= number // divisor <= 32
      assert number < 100
      assert problem.question == f"{number}-{divisor}?"
      assert len(lines) == problem.operations
      for line in lines:
        assert line == (number, divisor, number - divisor)
        number -= divisor
      assert number < divisor and end == f"#{number}."
      text, answer = problem.solution, problem.answer
      assert rewards.chain_sum(text, answer, finished=True).correct
      assert set(problem.question + problem.solution) <= set(tasks.CHARACTERS)

  def test_solutions_fit_288_tokens_with_their_end(self):
    every = itertools.product(range(3, 100), range(3, 10))
    solutions = (remainder.RemainderProblem(*x).solution for x in every)
    assert max(map(len, solutions)) < 288


class TestRemainder:
  @pytest.mark.parametrize("tail", [0.0, 0.7, 2.0])
  def test_number_of_operations_has_the_tail(self, tail):
    # Only one problem is held out, so that shares are as drawn.
    found = problems(4000, tail=tail, max_ops=10, eval_size=1)
    counts = collections.Counter(p.operations for p in found)
    shares = np.arange(1, 11) ** -tail
    expected = 4000 * shares / shares.sum()
    seen = np.asarray([counts[n] for n in range(1, 11)])
    assert (np.abs(seen - expected) < 4 * np.sqrt(expected)).all()

  def test_lengths_have_a_long_tail(self):
    lengths = [len(p.solution) for p in problems(2000)]
    assert 15 <= np.median(lengths) <= 32
    assert np.quantile(lengths, 0.99) > 200
