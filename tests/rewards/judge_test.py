"""Verdicts as arrays, and responses with their rewards."""

import dataclasses
import re

import numpy as np
from helpers import texts

from jaxrl_llm import rewards
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.types import Status


class TestJudge:
  TEXTS = ["#1.", "#2.", "#12.", "#2."]
  PROBLEMS = [
    texts.make_prompt(7, question, answer)
    for question, answer in zip(("1+0?", "0+1?", "1+1?", "1+1?"), "1122")
  ]

  ROLLOUT = texts.write(TEXTS, [Status.FINISHED] * 4)

  def judge(self, reward=rewards.chain_sum, **settings):
    return Judge(texts.decode, rewards.RewardPool(reward), **settings)

  def test_every_row_is_held_against_its_own_problem(self):
    rollout, judge = self.ROLLOUT, self.judge(correct=2.0, incorrect=-3.0)
    judged = judge(rollout, self.PROBLEMS)
    responses = judged.responses
    assert judged.texts == self.TEXTS
    assert responses.rollout is rollout
    np.testing.assert_array_equal(responses.correct, [True, False, False, True])
    np.testing.assert_array_equal(responses.rewards, [2.0, -3.0, -3.0, 2.0])
    assert responses.rewards.dtype == np.float32
    assert responses.correct.dtype == responses.judged.dtype == bool
    assert responses.judged.all() and judged.prompts is self.PROBLEMS

  def test_a_failure_is_told_once_of_its_kind(self):
    def failing(response, answer):
      if answer == "1":
        raise KeyError(response)
      return float(response)

    judge, told = self.judge(failing, name="mine"), []
    judge.tell = told.append
    judged = judge(self.ROLLOUT, self.PROBLEMS)
    assert (
      list(judged.new_failures) == [0, 2] and not judged.responses.judged.any()
    )
    place = r" \(judge_test.py:\d+\) on book-7"
    assert re.fullmatch(f"reward mine: KeyError: '#1.'{place}", told[0])
    assert re.fullmatch(f"reward mine: ValueError: .*'#12.'{place}", told[1])
    assert judge.failure == told[1]
    again = judge(self.ROLLOUT, self.PROBLEMS)
    assert list(again.new_failures) == [] and len(told) == 2

  def test_numbers_are_rewards_and_parts_are_kept(self):
    def parts(response, level):
      return {"right": response == "#2.", "level": level}

    grading = rewards.Grading({"level": -2.0}, threshold=0.5)
    pool = rewards.RewardPool(parts, grading=grading)
    problems = [
      dataclasses.replace(problem, columns={"level": level})
      for problem, level in zip(self.PROBLEMS, (0, 0.2, 0.1, 0.5))
    ]
    judge = Judge(texts.decode, pool, correct=2.0, incorrect=-3.0)
    responses = judge(self.ROLLOUT, problems).responses
    np.testing.assert_allclose(responses.rewards, [0, 0.6, -0.2, 0], atol=1e-6)
    # Correctness does not depend on the other component.
    np.testing.assert_array_equal(responses.correct, [False, True, False, True])
    assert set(responses.parts) == {"right", "level"}
    np.testing.assert_array_equal(responses.parts["right"], [0, 1, 0, 1])

  def test_a_reward_reads_what_it_names(self):
    seen = []

    def reading(prompt, tokens, finished, source, id, columns, *, x=3):
      seen.append((prompt, tokens, finished, source, id, columns, x))
      return True

    judge = self.judge(reading)
    problem = dataclasses.replace(self.PROBLEMS[0], columns={"x": 4})
    judge(texts.write(["#1."], [Status.OVERLONG]), [problem])
    text = [ord(c) for c in "#1."]
    assert seen == [("1+0?", text, False, "book", "book-7", {"x": 4}, 4)]

  def test_a_batched_reward_reads_groups(self):
    seen = []

    def comparing(response):
      seen.append(response)
      return [float(len(text) == max(map(len, response))) for text in response]

    comparing.batched = True
    # The first and the third response are to the same prompt.
    rollout = self.ROLLOUT.replace(group_id=np.int32([7, 8, 7, 8]))
    responses = self.judge(comparing)(rollout, self.PROBLEMS).responses
    assert seen == [["#1.", "#12."], ["#2.", "#2."]]
    np.testing.assert_array_equal(responses.rewards, [0, 1, 1, 1])

  def test_an_environment_has_no_part_in_the_text_that_is_judged(self):
    seen = []

    def reading(response, tokens, answer):
      seen.append((response, texts.decode(tokens)))
      return rewards.numeric(response, answer, finished=True)

    judge = self.judge(reading)
    # Two turns of the model, between which the environment says 42, and a
    # response that begins with a hint.
    spoken = ["a=42b", "a=42", "b=42"]
    rollout = texts.write(spoken, [Status.FINISHED] * 3)
    rollout.mask[:2, 2:4] = rollout.mask[2, :2] = False
    judged = judge(rollout, [texts.make_prompt(0, "?", "42")] * 3)
    assert seen == [("a=\nb", "a=b"), ("a=", "a="), ("b=42", "b=42")]
    np.testing.assert_array_equal(judged.responses.correct, [0, 0, 1])
    assert judged.responses.judged.all()
    assert judged.texts == spoken  # For people.

  def test_logged_numbers_are_no_reward(self):
    logged = lambda response: rewards.Verdict(True, logged={"n": 5})
    responses = self.judge(logged)(self.ROLLOUT, self.PROBLEMS).responses
    assert responses.parts["n"].tolist() == [5.0] * 4
    assert responses.rewards.tolist() == [1.0] * 4

  def test_a_fault_of_the_environment_leaves_no_verdict(self):
    judge, told = self.judge(name="mine"), []
    judge.tell = told.append
    talks = {"3": '{"turns": 2, "rewards": {}, "failed": "timeout"}'}
    judged = judge(self.ROLLOUT, self.PROBLEMS, talks)
    np.testing.assert_array_equal(judged.responses.judged, [1, 1, 1, 0])
    assert judged.responses.correct.tolist() == [True, False, False, False]
    assert told == ["reward mine: environment: timeout on book-7"]

  def test_rewards_are_one_and_nothing_unless_asked(self):
    responses = self.judge()(self.ROLLOUT, self.PROBLEMS).responses
    np.testing.assert_array_equal(responses.rewards, [1.0, 0.0, 0.0, 1.0])
