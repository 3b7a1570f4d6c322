"""The tasks chain_sum (problems, held-out evaluation, mixture) and sums."""

import collections
import functools
import re

import numpy as np
import pretraining
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.data import tasks


def problems(n, **settings):
  source = tasks.ChainSum(**settings)
  return [source.problem(i) for i in range(n)]


def right(solution, problem):
  return rewards.chain_sum(
    solution.text, problem.answer, finished=solution.stops
  ).correct


def longest_question(max_ops):
  return 2 * max_ops + 2


def longest_solution(max_ops):
  # `9+9=18;`, then `18+9=27;` and so on, then `#63.`
  return 8 * max_ops + 3


class TestChainProblem:
  def test_texts(self):
    problem = tasks.ChainProblem(terms=(7, 5, 8, -3))
    assert problem.question == "7+5+8-3?"
    assert problem.solution == "7+5=12;12+8=20;20-3=17;#17."
    assert problem.answer == "17"

  def test_random_problems_hold_their_invariants(self):
    for problem in problems(2000, seed=3):
      steps = re.findall(r"(\d+)([+-])(\d)=(\d+);", problem.solution)
      assert 1 <= len(steps) <= 6 and len(steps) == len(problem.terms) - 1
      for left, sign, term, total in steps:
        assert 1 <= int(term) <= 9 and 0 <= int(total) <= 99
        change = int(term) if sign == "+" else -int(term)
        assert int(left) + change == int(total)
      assert set(problem.question + problem.solution) <= set(tasks.CHARACTERS)
      assert len(problem.question) <= longest_question(len(steps))
      assert len(problem.solution) <= longest_solution(len(steps))
      solution = pretraining.Solution(problem.solution, True)
      assert right(solution, problem)

  @pytest.mark.parametrize("n", [1, 2, 6, 10])
  def test_longest_lengths_are_reached(self, n):
    problem = tasks.ChainProblem(terms=(9,) * (n + 1))
    assert len(problem.question) == longest_question(n)
    assert len(problem.solution) == longest_solution(n)

  def test_totals_stay_in_range_in_long_chains(self):
    rng = np.random.default_rng(0)
    for _ in range(20):
      problem = tasks.draw_problem(rng, min_ops=200, max_ops=200)
      assert min(problem.totals) >= 0 and max(problem.totals) <= 99


class TestChainSum:
  def test_number_of_operations_is_uniform(self):
    counts = collections.Counter(len(p.terms) - 1 for p in problems(3000))
    assert set(counts) == set(range(1, 7))
    assert min(counts.values()) > 420  # 500 expected, deviation 20.

  @pytest.mark.parametrize(
    "settings, fewest",
    [({}, 3), ({"max_ops": 2}, 2), ({"max_ops": 1, "eval_size": 9}, 1)],
  )
  def test_evaluation_asks_the_longer_problems(self, settings, fewest):
    source = tasks.ChainSum(split="eval", **settings)
    assert fewest == min(
      source.problem(i).operations for i in range(len(source))
    )

  def test_iteration_ends(self):
    assert len(list(tasks.ChainSum(split="eval", eval_size=5))) == 5


class TestNoisySolution:
  def draw(self, n, **shares):
    rng = np.random.default_rng(0)
    found = problems(n, seed=1)
    shares = {"misread": 0} | shares if "clean" in shares else shares
    write = functools.partial(
      pretraining.noisy_solution, max_length=64, **shares
    )
    return [(p, write(rng, p)) for p in found]

  def test_the_mixture(self):
    drawn = self.draw(6000)
    kinds = collections.Counter()
    for problem, solution in drawn:
      plus = tasks.ChainProblem(tuple(map(abs, problem.terms)))
      if solution.text == problem.solution:
        kinds["clean"] += 1
      elif solution.text == plus.solution:
        kinds["misread"] += 1
      elif not solution.stops:
        kinds["ramble"] += 1
      elif "=" not in solution.text:
        kinds["direct"] += 1
      elif solution.text.count("=") == len(problem.terms) - 1:
        kinds["slip"] += 1
        assert not right(solution, problem)
      else:
        kinds["skip"] += 1
    # Misreading a problem without a minus gives the correct text.
    plain = np.mean([min(problem.terms) > 0 for problem, _ in drawn])
    assert 0.2 < plain < 0.27
    assert abs(kinds["misread"] / 6000 - 0.58 * (1 - plain)) < 0.02
    assert abs(kinds["clean"] / 6000 - (0.27 + 0.58 * plain)) < 0.02
    assert abs(kinds["slip"] / 6000 - 0.05) < 0.01
    assert abs(kinds["ramble"] / 6000 - 0.0075) < 0.004
    # Short chains with all steps skipped count as direct here.
    assert kinds["direct"] / 6000 > 0.045 and kinds["skip"] / 6000 > 0.02
    share = np.mean([right(s, p) for p, s in drawn])
    assert 0.42 < share < 0.50

  def test_everything_is_in_the_alphabet_and_bounded(self):
    for problem, solution in self.draw(2000):
      assert set(solution.text) <= set(tasks.CHARACTERS)
      numbers = [int(x) for x in re.findall(r"[0-9]+", solution.text)]
      assert max(numbers, default=0) <= 99
      assert "=-" not in solution.text
      assert 0 < len(solution.text) <= 64
      assert solution.stops or len(solution.text) == 64
      assert solution.stops == solution.text.endswith(".")
      del problem

  def test_a_slip_carries_on(self):
    for problem, solution in self.draw(500, direct=0, clean=0, slip=1, skip=0):
      steps = re.findall(r"(\d+)([+-]\d)=(\d+);", solution.text)
      wrong = [int(a) + int(b) != int(c) for a, b, c in steps]
      assert sum(wrong) == 1
      before = [c for _, _, c in steps[:-1]]
      assert [a for a, _, _ in steps[1:]] == before
      assert solution.text.endswith(f"#{steps[-1][2]}.")
      assert not right(solution, problem)

  def test_a_skip_leaves_steps_out(self):
    shares = {"direct": 0, "clean": 0, "slip": 0, "skip": 1, "ramble": 0}
    for problem, solution in self.draw(500, **shares):
      assert len(solution.text) < len(problem.solution)
      assert right(solution, problem)
      for step in solution.text.split(";")[:-1]:
        assert step in problem.solution


class TestSums:
  @pytest.mark.parametrize("digits, total, held", [(1, 81, 20), (2, 8100, 200)])
  def test_splits_share_nothing_and_cover_all(self, digits, total, held):
    train = list(tasks.sums(digits=digits))
    evaluation = list(tasks.sums(digits=digits, split="eval"))
    assert (len(train), len(evaluation)) == (total - held, held)
    assert len({e.question for e in train + evaluation}) == total
    for example in train[:50]:
      left, right = example.question.removesuffix(" =").split(" + ")
      assert len(left) == len(right) == digits
      assert int(left) + int(right) == int(example.answer)

  def test_seed_orders_training_only(self):
    questions = [
      [e.question for e in tasks.sums(seed=s, split=split)][:20]
      for split in ("train", "eval")
      for s in (0, 1)
    ]
    assert questions[0] != questions[1] and questions[2] == questions[3]
