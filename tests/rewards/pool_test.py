"""Workers that hang, die or raise cost their own sample and nothing else."""

import os
import time

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards.exact import Score


def moody(response, answer, *, finished):
  """Does what the response says."""
  if response == "hang":
    while True:
      time.sleep(3600)
  if response == "die":
    os._exit(3)
  if response == "raise":
    raise KeyError("no\nluck")
  if response == "devour":
    bytearray(100 * 2**30)
  if response == "print":
    print('[true, "forged", null]', flush=True)
  if response == "pid":
    return Score(True, str(os.getpid()))
  return Score(response == answer and finished, response[:100])


class TestInline:
  def test_scores_in_order(self):
    pool = rewards.RewardPool(rewards.chain_sum)
    scores = pool.score(["#1.", "#2.", "#1."], ["1"] * 3, [True, True, False])
    assert [s.correct for s in scores] == [True, False, False]
    assert not pool.errors

  def test_an_exception_is_counted_not_scored(self):
    pool = rewards.RewardPool(moody)
    scores = pool.score(["raise", "a"], ["a", "a"], [True, True])
    assert scores[0].error.startswith("error: KeyError")
    assert scores[1] == Score(True, "a")
    assert pool.errors == {"error": 1}

  def test_settings_out_of_range(self):
    with pytest.raises(ValueError, match="workers=0"):
      rewards.RewardPool(rewards.math_verify)
    with pytest.raises(ValueError, match="deadline_s"):
      rewards.RewardPool(moody, deadline_s=0.0)
    with pytest.raises(ValueError, match="importable"):
      rewards.RewardPool(lambda r, a, finished: None, workers=1)

  def test_unequal_lengths(self):
    with pytest.raises(ValueError):
      rewards.RewardPool(moody).score(["a"], [], [])


class TestWorkers:
  def test_failures_cost_their_own_sample_only(self):
    responses = ["a", "hang", "b", "die", "raise", "devour", "print", "a", ""]
    with rewards.RewardPool(moody, workers=2, deadline_s=3.0) as pool:
      scores = pool.score(responses, ["a"] * 9, [True] * 9)
      errors = [(s.error or "").partition("(")[0] for s in scores]
      assert errors[1] == "timeout" and errors[3] == "crash"
      assert errors[4].startswith("error: KeyError")
      assert errors[5].startswith("error: MemoryError")
      assert [e for k, e in enumerate(errors) if k not in (1, 3, 4, 5)] == (
        [""] * 5
      )
      assert [s.correct for s in scores] == [True] + [False] * 6 + [True, False]
      assert pool.errors == {"timeout": 1, "crash": 1, "error": 2}
      # The next batch is served as if nothing had happened, and counts on.
      again = pool.score(["a", "die"], ["a", "a"], [True, True])
      assert again == [Score(True, "a"), Score(False, None, "crash")]
      assert pool.errors["crash"] == 2

  def test_long_text_and_fresh_workers_for_every_batch(self):
    with rewards.RewardPool(moody, workers=1) as pool:
      long = "\u2212\n" * 500_000
      first = pool.score([long, "pid"], [long, ""], [True, True])
      assert first[0].correct
      second = pool.score(["pid"], [""], [True])
      assert pool.score([], [], []) == []
    assert first[1].extracted != second[0].extracted
    assert not pool.errors
