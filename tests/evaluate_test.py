"""Tests of avg@k and pass@k with a sampler whose answers are known."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import texts as written

from jaxrl_llm import evaluate, rewards
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rollout.writer import ResponseWriter
from jaxrl_llm.sampling import EngineConfig, SamplingSettings
from jaxrl_llm.types import Status

# Two responses to each of three problems; 'x' is truncated.
TEXTS = [["#1.", "#1."], ["#2.", "#9."], ["#3.x", "none"]]


class Scripted:
  """An engine that returns TEXTS and records its requests."""

  config = EngineConfig(
    slots=2, max_prompt_length=4, max_response_length=5, stop_tokens=[1]
  )

  def generate_window(self, params, requests, *, key, settings, **others):
    self.asked = (params, requests, key, settings)
    each = len(requests.sample_id) // len(TEXTS)
    texts = [text for group in TEXTS for text in group[:each]]
    cut = [text.endswith("x") for text in texts]
    texts = [text.removesuffix("x") for text in texts]
    status = np.where(cut, int(Status.OVERLONG), int(Status.FINISHED))
    return written.write(texts, status, room=5, group_size=each)


def make_evaluator(engine, reward=rewards.chain_sum):
  return evaluate.Evaluator(
    name="some",
    prompts=[
      written.make_prompt(i, f"question {i}", str(i + 1)) for i in range(3)
    ],
    writer=ResponseWriter(
      engine,
      SamplingSettings(temperature=0.5),
      jax.random.key(3),
      2,
      Judge(written.decode, rewards.RewardPool(reward)),
    ),
  )


def run(reward=rewards.chain_sum):
  engine = Scripted()
  evaluator = make_evaluator(engine, reward)
  evaluated = evaluator("weights")
  assert evaluated.name == "some" and evaluated.generate_s >= 0
  return engine, evaluated.results([1, 2]), evaluated.shown()


def votes(*answers):
  return [rewards.Verdict(correct=c, extracted=e) for e, c in answers]


class TestEvaluate:
  def test_numbers_by_hand(self):
    _, results, _ = run()
    # Accuracies 1, 1/2 and 0: a truncated response counts as wrong.
    assert results["avg@2"] == pytest.approx(0.5)
    assert results["avg@2_se"] == pytest.approx(0.5 / np.sqrt(3))
    assert results["pass@1"] == pytest.approx(0.5)
    assert results["pass@2"] == pytest.approx(2 / 3)
    assert results["overlong_fraction"] == pytest.approx(1 / 6)
    assert results["response_length_mean"] == pytest.approx(19 / 6)
    assert results["unjudged_fraction"] == 0

  def test_greedily_each_problem_has_one_response(self):
    engine = Scripted()
    evaluated = make_evaluator(engine).greedy()("weights")
    assert evaluated.results([])["avg@1"] == pytest.approx(2 / 3)
    _, requests, _, settings = engine.asked
    assert settings.temperature == 0 and len(requests.sample_id) == 3

  def test_majority_by_hand(self):
    verdicts = [
      *votes(("7", True), ("8", False), ("7", True)),
      *votes(("7", True), ("8", False), ("8", False)),
      *votes((None, False), (None, False), ("5", True)),
      *votes(*3 * [(None, False)]),
    ]
    assert evaluate.majority_at_k(verdicts, 3) == 0.5

  def test_weighted_votes_by_hand(self):
    verdicts = votes(("7", True), ("8", False), ("8", False), (None, False))
    assert evaluate.majority_at_k(verdicts, 4) == 0.0
    assert evaluate.majority_at_k(verdicts, 4, [3, 1, 1, 9]) == 1.0
    assert evaluate.majority_at_k(verdicts, 4, [3, 1, 2.5, 9]) == 0.0

  def test_a_critic_chooses(self):
    evaluated = make_evaluator(Scripted())("weights")
    right = evaluated.responses.correct.astype(np.float32)
    best = dataclasses.replace(evaluated, values=right).results([])
    worst = dataclasses.replace(evaluated, values=-right).results([])
    # Of two responses each, 2, 1 and 0 are correct.
    assert best["best@2"] == pytest.approx(2 / 3)
    assert worst["best@2"] == pytest.approx(1 / 3)
    assert best["weighted_maj@2"] == pytest.approx(2 / 3)
    assert not {"best@2", "weighted_maj@2"} & evaluated.results([]).keys()

  def test_a_reward_that_extracts_nothing_has_no_majority(self):
    verdict = rewards.Verdict(correct=True, extracted=None)
    assert evaluate.majority_at_k([verdict] * 2, 2) == 0.0
    _, results, _ = run(lambda response, answer: 0.9)
    assert "maj@2" not in results and results["avg@2"] == 1.0

  def test_every_response_has_a_number_of_its_own(self):
    engine, _, _ = run()
    params, requests, key, settings = engine.asked
    assert params == "weights" and (requests.prompt_lengths == 1).all()
    assert requests.prompt_tokens[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert requests.sample_id.tolist() == [*range(6)]
    assert key == jax.random.key(3) and settings.temperature == 0.5

  def test_a_verifier_that_fails_is_counted(self):
    def failing(response, answer, *, finished):
      if answer == "2":
        raise KeyError("no")
      return rewards.chain_sum(response, answer, finished=finished)

    _, results, _ = run(failing)
    assert results["unjudged_fraction"] == pytest.approx(1 / 3)
    assert results["avg@2"] == pytest.approx(1 / 3)

  def test_samples_show_what_was_written(self):
    _, _, samples = run()
    assert len(samples) == 4
    shown = "question 0", "#1.", "1", "1", 1.0, 3, "finished"
    assert samples[0][: len(shown)] == shown
