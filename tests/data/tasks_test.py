"""The tasks chain_sum, sums and remainder: problems, splits, solutions."""

import collections
import hashlib
import itertools
import re

import numpy as np
import pretraining
import pytest
from helpers import cases

from jaxrl_llm import rewards
from jaxrl_llm.data import remainder, tasks


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


def remainders(n, **settings):
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
    for problem in remainders(1000, seed=3):
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
    found = remainders(4000, tail=tail, max_ops=10, eval_size=1)
    counts = collections.Counter(p.operations for p in found)
    shares = np.arange(1, 11) ** -tail
    expected = 4000 * shares / shares.sum()
    seen = np.asarray([counts[n] for n in range(1, 11)])
    assert (np.abs(seen - expected) < 4 * np.sqrt(expected)).all()

  def test_lengths_have_a_long_tail(self):
    lengths = [len(p.solution) for p in remainders(2000)]
    assert 15 <= np.median(lengths) <= 32
    assert np.quantile(lengths, 0.99) > 200


TASKS = {"chain_sum": tasks.ChainSum, "remainder": remainder.Remainder}
_CASES = cases.load("problems")
DIGESTS = {"chain_sum": "1a827cd2dcc3be65", "remainder": "efb83662a0ec894b"}
# One held-out problem too many: training needs one of 126 sums of two numbers
# and one of 42 divisions that end after one line.
FULL = {"chain_sum": 126, "remainder": 42}
SETTINGS = [
  *(("chain_sum", x) for x in ({}, {"max_ops": 2}, {"min_ops": 3})),
  ("chain_sum", {"max_ops": 1, "eval_size": 100}),
  *(("remainder", x) for x in ({}, {"tail": 2.0})),
  ("remainder", {"max_ops": 2, "eval_size": 20}),
]
either = pytest.mark.parametrize("task", TASKS)


def questions(task, n, **settings):
  source = TASKS[task](**settings)
  return [source[i].question for i in range(n)]


@either
def test_index_alone_decides(task):
  forward, source = questions(task, 50, seed=5), TASKS[task](seed=5)
  assert [source[i].question for i in reversed(range(50))] == forward[::-1]
  assert questions(task, 50, seed=6) != forward
  example = source[np.int64(7)]
  assert example.question == forward[7]
  assert (example.id, example.source) == (f"{task}-train-7", f"{task}/train")


@either
def test_golden_problems(task):
  found = questions(task, 3) + questions(task, 3, split="eval")
  assert found == _CASES["golden"][task].split()


@either
def test_evaluation_is_fixed_and_distinct(task):
  held_out = questions(task, 200, split="eval", seed=1)
  assert len(TASKS[task](split="eval")) == len(set(held_out)) == 200
  assert questions(task, 200, split="eval", seed=2) == held_out
  assert questions(task, 200, split="eval", eval_size=210) == held_out


@pytest.mark.parametrize(("task", "settings"), SETTINGS)
def test_no_training_index_asks_an_evaluation_problem(task, settings):
  evaluation = TASKS[task](split="eval", **settings)
  held_out = {example.question for example in evaluation}
  drawn = questions(task, 3000, seed=1, **settings)
  assert len(held_out) == len(evaluation) and not held_out.intersection(drawn)
  if "eval_size" in settings:  # Otherwise they would often be drawn.
    free = questions(task, 3000, **settings | {"eval_size": 1})
    assert len(held_out.intersection(free)) > 5


@either
def test_as_many_are_held_out_as_leave_one_to_train_on(task):
  settings = {"max_ops": 1, "eval_size": FULL[task]}
  with pytest.raises(ValueError, match=f"={FULL[task]} is too large"):
    TASKS[task](**settings)
  TASKS[task](**settings | {"eval_size": FULL[task] - 1})


@either
def test_noisy_solutions_are_those_of_the_shipped_bases(task):
  """Others would train other bases: see scripts/dev/pretraining.py."""
  settings, rng = pretraining.TASKS[task], np.random.default_rng(0)
  source = TASKS[task](**settings.task_settings)
  drawn = [
    pretraining.noisy_solution(rng, source.problem(i), max_length=64)
    for i in range(2000)
  ]
  assert [solution.text for solution in drawn[6:12]] == _CASES["noisy"][
    task
  ].split()
  text = "\n".join(f"{solution.text}{solution.stops}" for solution in drawn)
  assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[task]
