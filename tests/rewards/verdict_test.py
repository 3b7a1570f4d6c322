"""Return values and inputs of a reward, and exact checks."""

import numpy as np
import pytest
from helpers import cases

from jaxrl_llm import rewards
from jaxrl_llm.rewards import verdict as verdicts
from jaxrl_llm.rewards.verdict import Grading, Verdict, arguments, as_verdict

_CASES = cases.load("rewards")


class TestAsVerdict:
  @pytest.mark.parametrize(
    "result, expected",
    [
      (True, Verdict(True)),
      (np.bool_(False), Verdict(False)),
      (0.5, Verdict(False, value=0.5)),
      (1, Verdict(True, value=1.0)),
      (np.float32(2), Verdict(True, value=2.0)),
      (np.ones((1,)), Verdict(True, value=1.0)),
      ({"a": True, "b": 2}, Verdict(True, value=3.0, parts={"a": 1, "b": 2})),
      (Verdict(np.True_, 7, error=""), Verdict(True, "7")),
      (Verdict(None, "7", value=0.75), Verdict(True, "7", value=0.75)),
      (
        Verdict(False, parts={"a": 2}),
        Verdict(False, value=2.0, parts={"a": 2.0}),
      ),
    ],
  )
  def test_kinds(self, result, expected):
    assert as_verdict(result) == expected

  def test_weights_and_threshold(self):
    grading = Grading({"a": 0.5, "b": -1.0}, threshold=-2.0)
    found = as_verdict({"a": 2.0, "b": 3.0, "c": 0.25}, grading)
    assert found.value == pytest.approx(-1.75) and found.correct is True
    assert as_verdict(-2.0, grading).correct is False

  @cases.table("parts, right", _CASES["one_part_says_what_is_right"])
  def test_one_part_says_what_is_right(self, parts, right):
    for result in (parts, Verdict(None, parts=parts)):
      found = as_verdict(result)
      assert found.correct is right
      assert found.value == pytest.approx(sum(parts.values()))
    assert as_verdict(Verdict(None, value=0.6, parts=parts)).correct is True

  @pytest.mark.parametrize(
    "result, said",
    [
      (Verdict(0.37, None), "Verdict.correct is 0.37; give True or False"),
      (Verdict("yes", None), "Verdict.correct is 'yes'"),
      (Verdict(1), "Verdict.correct is 1;"),
      (Verdict(None), "Verdict.correct is None"),
      (Verdict(False, error=KeyError("x")), "Verdict.error is KeyError"),
      ("0.5", "the reward is '0.5'; give a number"),
      (None, "the reward is None; give a number"),
      ([1.0, 2.0], "give a number"),
      (float("nan"), "the reward is nan; give a finite number"),
      (np.float32("inf"), "the reward is inf"),
      ({"a": 1.0, "b": "x"}, "part 'b' is 'x'; give a number"),
      ({"a": float("-inf")}, "part 'a' is -inf"),
      ({}, "Verdict.correct is None"),
    ],
  )
  def test_anything_else_is_a_failure(self, result, said):
    with pytest.raises((TypeError, ValueError), match=said):
      as_verdict(result)


class TestArguments:
  KNOWN = {
    "prompt": "1+1?",
    "response": "2",
    "answer": "2",
    "columns": {"answer": 2, "level": 3},
  }

  @pytest.mark.parametrize(
    "fn, expected",
    [
      (lambda response, level: 0, {"response": "2", "level": 3}),
      (lambda *, answer, tests=(): 0, {"answer": "2"}),
      (
        lambda prompt, **columns: 0,
        {"prompt": "1+1?", "answer": "2", "level": 3},
      ),
      (lambda columns: 0, {"columns": {"answer": 2, "level": 3}}),
    ],
  )
  def test_by_name(self, fn, expected):
    assert arguments(fn, self.KNOWN) == expected

  def test_a_name_that_nothing_has(self):
    said = "it reads 'tests', but the columns are 'answer', 'level'"
    with pytest.raises(TypeError, match=said):
      arguments(lambda response, tests: 0, self.KNOWN)


def test_a_failure_names_the_line_of_the_reward():
  def reward():
    return int("x\ny")

  try:
    reward()
  except ValueError as error:
    line = error.__traceback__.tb_next.tb_lineno
    found = verdicts.failure(error)
  assert found.startswith("error: ValueError: invalid literal for int()")
  assert found.endswith(f"'x\\ny' (verdict_test.py:{line})")


class TestChainSum:
  @cases.table("response, correct, extracted", _CASES["final_answer"])
  def test_only_the_final_answer_counts(self, response, correct, extracted):
    verdict = rewards.chain_sum(response, "12", finished=True)
    assert verdict == rewards.Verdict(correct, extracted)

  def test_an_unfinished_response_is_not_correct(self):
    verdict = rewards.chain_sum("#12.", "12", finished=False)
    assert verdict == rewards.Verdict(False, "12")


class TestExactLine:
  @cases.table("response, finished, correct", _CASES["first_line"])
  def test_the_first_line_is_the_answer(self, response, finished, correct):
    verdict = rewards.exact_line(response, "85", finished=finished)
    assert verdict.correct is correct
