"""Exact checks: chain_sum's final answer, and the first line."""

from helpers import cases

from jaxrl_llm import rewards

_CASES = cases.load("rewards")


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
