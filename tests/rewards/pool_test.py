"""Workers that hang, die or raise cost their own sample and nothing else."""

import contextlib
import os
import signal
import time

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards.exact import Verdict


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
  if response == "forge":  # Into every file that it finds open.
    for number in range(1, 20):
      with contextlib.suppress(OSError):
        os.write(number, b"forged\n")
  if response == "talk":
    return Verdict(True, "x" * 10**8)
  if response == "pid":
    return Verdict(True, str(os.getpid()))
  return Verdict(response == answer and finished, response[:100])


def judge(pool, responses, answers, finished):
  """Verdicts of responses to questions without further columns."""
  rows = zip(responses, answers, finished, strict=True)
  return pool.judge(
    [
      {"response": r, "answer": a, "finished": f, "columns": {}}
      for r, a, f in rows
    ]
  )


class TestInline:
  def test_judges_in_order(self):
    pool = rewards.RewardPool(rewards.chain_sum)
    texts, finished = ["#1.", "#2.", "#1."], [True, True, False]
    verdicts = judge(pool, texts, ["1"] * 3, finished)
    assert [v.correct for v in verdicts] == [True, False, False]

  def test_an_exception_is_no_verdict(self):
    pool = rewards.RewardPool(moody)
    verdicts = judge(pool, ["raise", "a"], ["a", "a"], [True, True])
    assert verdicts[0].error.startswith("error: KeyError")
    assert verdicts[1] == Verdict(True, "a")

  def test_a_reward_and_its_workers(self):
    with pytest.raises(ValueError, match="workers=0"):
      rewards.RewardPool(rewards.math_verify)
    with pytest.raises(ValueError, match="importable"):
      rewards.RewardPool(lambda r, a, finished: None, workers=1)


class TestWorkers:
  def test_failures_cost_their_own_sample_only(self):
    responses = ["a", "hang", "b", "die", "raise", "devour", "print", "a", ""]
    with contextlib.closing(
      rewards.RewardPool(moody, workers=2, deadline_s=3.0)
    ) as pool:
      verdicts = judge(pool, responses, ["a"] * 9, [True] * 9)
      errors = [(v.error or "").partition("(")[0] for v in verdicts]
      assert errors[1] == "timeout" and errors[3] == "crash"
      assert errors[4].startswith("error: KeyError")
      assert errors[5].startswith("error: MemoryError")
      assert [e for k, e in enumerate(errors) if k not in (1, 3, 4, 5)] == (
        [""] * 5
      )
      correct = [v.correct for v in verdicts]
      assert correct == [True] + [False] * 6 + [True, False]
      # The next batch is served as if nothing had happened.
      again = judge(pool, ["a", "die"], ["a", "a"], [True, True])
      assert again == [Verdict(True, "a"), Verdict(False, None, "crash")]

  def test_long_text_and_fresh_workers_for_every_batch(self):
    with contextlib.closing(rewards.RewardPool(moody, workers=1)) as pool:
      long = "\u2212\n" * 500_000
      first = judge(pool, [long, "pid"], [long, ""], [True, True])
      assert first[0].correct
      second = judge(pool, ["pid"], [""], [True])
      assert judge(pool, [], [], []) == []
    assert first[1].extracted != second[0].extracted

  def test_a_worker_that_was_killed_while_idle_costs_nobody_a_verdict(self):
    with contextlib.closing(rewards.RewardPool(moody, workers=2)) as pool:
      for _ in range(2):  # Those of the start, and those of a batch.
        for worker in (pool._calls._idle.get() for _ in range(2)):
          assert worker.started()
          pid = worker._process.pid
          os.kill(pid, signal.SIGKILL)
          os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
          pool._calls._idle.put(worker)
        verdicts = judge(pool, ["a"] * 4, ["a"] * 4, [True] * 4)
        assert verdicts == [Verdict(True, "a")] * 4

  def test_what_is_no_answer_is_a_crash(self):
    with contextlib.closing(rewards.RewardPool(moody, workers=1)) as pool:
      texts = ["forge", "a", "talk", "a"]
      verdicts = judge(pool, texts, ["a"] * 4, [True] * 4)
      assert [v.error for v in verdicts] == ["crash", None, "crash", None]
      assert verdicts[1] == verdicts[3] == Verdict(True, "a")
