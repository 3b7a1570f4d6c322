"""Common behaviour of chain_sum and remainder: seeds, splits, solutions."""

import hashlib

import numpy as np
import pretraining
import pytest
from helpers import cases

from jaxrl_llm.data import remainder, tasks

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
