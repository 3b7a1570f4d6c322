"""The tasks chain_sum (problems, held-out evaluation) and sums."""

import collections
import re

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.data import tasks


def problems(n, **settings):
  source = tasks.ChainSum(**settings)
  return [source.problem(i) for i in range(n)]


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
      # The longest are those of 9+9+9+9+9+9+9?
      assert len(problem.question) <= 14 and len(problem.solution) <= 51
      text, answer = problem.solution, problem.answer
      assert rewards.chain_sum(text, answer, finished=True).correct

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
