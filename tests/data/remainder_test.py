"""The task remainder: exact countdowns, a long tail, the noisy mixture."""

import collections
import re

import numpy as np
import pretraining
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.data import remainder, tasks


def problems(n, **settings):
  source = remainder.Remainder(**settings)
  return [source.problem(i) for i in range(n)]


def right(solution, problem):
  return rewards.chain_sum(
    solution.text, problem.answer, finished=solution.stops
  ).correct


def parse(text):
  """Returns the lines as (number, divisor, left), and the text after them."""
  *lines, end = text.split(";")
  matches = [re.fullmatch(r"(\d+)-(\d)=(\d+)", line) for line in lines]
  return [tuple(map(int, m.groups())) for m in matches], end


def longest_solution(max_ops):
  """Returns characters: the largest number below 100 by the largest divisor."""
  divisor = min(9, 100 // (max_ops + 1))
  number = (max_ops + 1) * divisor - 1
  return len(remainder.RemainderProblem(number, divisor).solution)


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
      assert right(pretraining.Solution(problem.solution, True), problem)
      assert set(problem.question + problem.solution) <= set(tasks.CHARACTERS)
      longest = longest_solution(problem.operations)
      assert len(problem.solution) <= longest

  @pytest.mark.parametrize("n", [1, 2, 11, 20, 32])
  def test_longest_length_is_that_of_some_problem(self, n):
    lengths = [
      len(remainder.RemainderProblem(number, divisor).solution)
      for divisor in range(3, 10)
      for number in range(divisor, min((n + 1) * divisor, 100))
    ]
    assert max(lengths) == longest_solution(n)

  def test_default_problems_fit_288_tokens_with_their_end(self):
    assert longest_solution(32) == 254


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
    assert max(lengths) <= longest_solution(32)


class TestNoisySolution:
  def draw(self, n, kind=None, **settings):
    if kind:
      kinds = ("direct", "clean", "slip", "early", "stuck")
      settings |= {name: float(name == kind) for name in kinds}
    rng = np.random.default_rng(0)
    return [
      (p, pretraining.noisy_solution(rng, p, max_length=512, **settings))
      for p in problems(n, seed=1)
    ]

  def test_clean(self):
    for problem, solution in self.draw(50, "clean"):
      assert solution == (problem.solution, True)

  @pytest.mark.parametrize("share", [0.0, 1.0])
  def test_direct_guesses(self, share):
    for problem, solution in self.draw(200, "direct", direct_right=share):
      guess = re.fullmatch(r"#(\d+)\.", solution.text)
      assert 0 <= int(guess[1]) < problem.divisor and solution.stops
      assert right(solution, problem) == share

  def test_a_slip_is_one_wrong_line_carried_on(self):
    for problem, solution in self.draw(500, "slip"):
      number, wrong = problem.number, 0
      lines, end = parse(solution.text)
      for before, divisor, left in lines:
        assert (before, divisor) == (number, problem.divisor)
        wrong += left != number - divisor
        number = left
      assert wrong == 1 and number < problem.divisor and end == f"#{number}."
      assert solution.stops and not right(solution, problem)

  def test_early_ends_stand_on_a_number_that_is_too_large(self):
    for problem, solution in self.draw(300, "early"):
      lines, end = parse(solution.text)
      clean, _ = parse(problem.solution)
      assert lines == clean[: len(lines)] and len(lines) < len(clean)
      assert end == f"#{clean[len(lines)][0]}."
      assert solution.stops and not right(solution, problem)

  def test_stuck_solutions_repeat_a_line_to_the_limit(self):
    for problem, solution in self.draw(200, "stuck"):
      text = solution.text
      assert not solution.stops and len(text) == 512
      line = text.split(";")[-2] + ";"
      start = text.index(line)
      assert problem.solution.startswith(text[: start + len(line)])
      assert (line * 512).startswith(text[start:])

  def test_the_mixture(self):
    drawn = self.draw(5000)
    shares = {
      "direct": np.mean([";" not in s.text for _, s in drawn]),
      "clean": np.mean([s.text == p.solution for p, s in drawn]),
      "stuck": np.mean([not s.stops for _, s in drawn]),
    }
    # Early ends before the first line look like guesses.
    assert abs(shares["clean"] - 0.36) < 0.03
    assert 0.38 < shares["direct"] < 0.46
    assert abs(shares["stuck"] - 0.03) < 0.01
    assert all(set(s.text) <= set(tasks.CHARACTERS) for _, s in drawn)
    assert max(len(s.text) for _, s in drawn) == 512
