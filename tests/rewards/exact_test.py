"""Exact checks: chain_sum's final answer, and the first line."""

import pytest

from jaxrl_llm import rewards


class TestChainSum:
  @pytest.mark.parametrize(
    "response, correct, extracted",
    [
      ("7+5=12;#12.", True, "12"),
      ("#12.", True, "12"),
      ("#1.#12.", True, "12"),
      ("#12.#1.", False, "1"),
      ("7+5=12;#12", False, None),
      ("#12.;", False, None),
      ("#12.\n", False, None),
      ("#012.", False, "012"),
      ("#+12.", False, None),
      ("#-12.", False, None),
      ("12.", False, None),
      ("##12.", True, "12"),
      ("#\u0661\u0662.", False, None),
      ("", False, None),
      ("#" + "1" * 10**6 + ".", False, None),
    ],
  )
  def test_only_the_final_answer_counts(self, response, correct, extracted):
    verdict = rewards.chain_sum(response, "12", finished=True)
    assert verdict == rewards.Verdict(correct, extracted)

  def test_an_unfinished_response_is_not_correct(self):
    verdict = rewards.chain_sum("#12.", "12", finished=False)
    assert verdict == rewards.Verdict(False, "12")


class TestExactLine:
  @pytest.mark.parametrize(
    "response, finished, correct",
    [
      ("85", True, True),
      (" 85 \n12+3=15\n", False, True),
      ("85", False, False),  # Could become 850.
      ("850\n", True, False),
      ("\n85\n", True, False),
      ("85 or 86\n", True, False),
      ("", True, False),
    ],
  )
  def test_the_first_line_is_the_answer(self, response, finished, correct):
    verdict = rewards.exact_line(response, "85", finished=finished)
    assert verdict.correct is correct
