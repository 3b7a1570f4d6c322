"""Workers that hang, die or raise lose only their own sample."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards.exact import Verdict

# Seconds; identifies processes of this test run that must not remain.
_LONG = os.environ.setdefault("POOL_TEST_SLEEPS_S", f"98765.{os.getpid()}")
_NO_VERDICTS = {
  "object": object(),
  "nan": float("nan"),
  "inf": float("inf"),
  "text": "1.0",
}


_RIGHT = '[[true, "forged", null, 9.0, {}], null]'
_FORGED = {
  "type": "[7, null]",
  "no number": "[[true, null, null, NaN, {}], null]",
  "depth": "[" * 100_000,
  "lines": f"{_RIGHT}\n{_RIGHT}",  # The second would answer the next call.
  "error": '[[[true, "forged", 7, null, {}]], null]',
}


def write_everywhere(text):
  """Writes a line into every open file."""
  for number in range(1, 20):
    with contextlib.suppress(OSError):
      os.write(number, f"{text}\n".encode())


def write_as_answer(text):
  """Forges an answer, which requires knowledge of the worker's code."""
  frame = sys._getframe()
  while "mark" not in frame.f_locals:
    frame = frame.f_back
  line = f"{frame.f_locals['mark']}{text}\n"
  os.write(frame.f_locals["write"], line.encode())
  os._exit(0)


class Prepared:
  """Returns the process in which it was prepared."""

  __name__ = "prepared"

  def prepare(self):
    os.environ["PREPARED_BY"] = str(os.getpid())

  def __call__(self, response):
    return Verdict(True, os.environ["PREPARED_BY"])


def moody(response, answer, *, finished, level=None):
  """Behaves as the response says."""
  if level is not None:
    return level == 3
  if response == "hang":
    while True:
      time.sleep(3600)
  if response == "die":
    os._exit(3)
  if response == "raise":
    raise KeyError("no\nluck")
  if response == "count":  # In C, holding the GIL.
    return 9**9**9
  if response == "segfault":
    os.kill(os.getpid(), signal.SIGSEGV)
  if response == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)
  if response == "breed":
    for _ in range(20):
      subprocess.Popen(["sleep", _LONG])
    time.sleep(3600)
  if response == "babble":
    print("la " * 100_000, flush=True)
  if response in _NO_VERDICTS:
    return _NO_VERDICTS[response]
  if response == "devour":
    bytearray(100 * 2**30)
  if response == "print":
    print('[true, "forged", null]', flush=True)
  if response == "forge":
    write_everywhere("forged")
  if response == "write_pipe":
    write_everywhere(_RIGHT)
  if response == "monkey":
    json.dumps = lambda *_, **__: _RIGHT
  if response in _FORGED:
    write_as_answer(_FORGED[response])
  if response == "daemon":
    subprocess.Popen(["sleep", _LONG], start_new_session=True)
    return True
  if response == "talk":
    return Verdict(True, "x" * (2 * 10**7))
  if response == "pid":
    return Verdict(True, str(os.getpid()))
  return Verdict(response == answer and finished, response[:100])


def judge(pool, responses, answers, finished):
  """Returns verdicts of responses to questions without further columns."""
  rows = zip(responses, answers, finished, strict=True)
  return pool.judge(
    [
      {"response": r, "answer": a, "finished": f, "columns": {}}
      for r, a, f in rows
    ]
  )


class TestInline:
  def test_an_exit_is_no_verdict(self):
    def leaving(response):
      sys.exit(0)

    pool = rewards.RewardPool(leaving)
    (verdict,) = judge(pool, ["1"], ["1"], [True])
    assert verdict.error.startswith("error: SystemExit: 0 (pool_test.py:")

  def test_a_reward_and_its_workers(self):
    with pytest.raises(ValueError, match="workers=0"):
      rewards.RewardPool(rewards.math_verify)
    with pytest.raises(ValueError, match="importable"):
      rewards.RewardPool(lambda r, a, finished: None, workers=1)


@pytest.fixture(scope="module")
def pool():
  """A pool with one worker, as no response may affect a later one."""
  with contextlib.closing(rewards.RewardPool(moody, workers=1)) as pool:
    yield pool


@pytest.mark.parametrize("workers", [0, 1])
def test_each_of_several_answers_counts(workers):
  # Text of a list never matches; its first element would refuse the others.
  texts = [
    r"\boxed{72}",
    r"\boxed{1.5}",
    r"\boxed{3}",
    r'\boxed{["72", "3/2"]}',
  ]
  calls = [
    {"response": x, "answer": ["72", "3/2"], "finished": True, "columns": {}}
    for x in texts
  ]
  with contextlib.closing(
    rewards.RewardPool(rewards.numeric, workers=workers)
  ) as pool:
    found = pool.judge(calls)
  assert [v.correct for v in found] == [True, True, False, False]
  assert not any(v.error for v in found)


class TestWorkers:
  def test_long_text_and_a_process_for_every_response(self, pool):
    workers = set(psutil.Process().children())
    long = "\u2212\n" * 500_000
    verdicts = judge(pool, [long, "pid", "pid"], [long, "", ""], [True] * 3)
    assert verdicts[0].correct
    verdicts += judge(pool, ["pid"], [""], [True])
    assert judge(pool, [], [], []) == []
    # A restart would cost more than many verdicts.
    assert set(psutil.Process().children()) == workers
    assert len({verdict.extracted for verdict in verdicts[1:]}) == 3

  def test_what_a_reward_prepares_is_there_for_every_response(self):
    with contextlib.closing(rewards.RewardPool(Prepared(), workers=1)) as pool:
      verdicts = judge(pool, ["a", "b"], ["", ""], [True, True])
    assert verdicts[0].extracted and verdicts[0] == verdicts[1]

  def test_a_worker_that_was_killed_while_idle_costs_nobody_a_verdict(self):
    with contextlib.closing(rewards.RewardPool(moody, workers=2)) as pool:
      for _ in range(2):  # At the start, and after a batch.
        for worker in (pool._calls._idle.get() for _ in range(2)):
          assert worker.started()
          pid = worker._process.pid
          os.kill(pid, signal.SIGKILL)
          os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
          pool._calls._idle.put(worker)
        verdicts = judge(pool, ["a"] * 4, ["a"] * 4, [True] * 4)
        assert verdicts == [Verdict(True, "a")] * 4

  def test_what_is_no_answer_is_a_crash(self, pool):
    bad = ["forge", "write_pipe", "talk", *_FORGED]
    texts = [text for name in bad for text in (name, "a")]
    verdicts = judge(pool, texts, ["a"] * len(texts), [True] * len(texts))
    assert verdicts[::2] == [Verdict(False, None, "crash")] * len(bad)
    assert verdicts[1::2] == [Verdict(True, "a")] * len(bad)

  def test_columns_that_json_lacks(self, pool):
    columns = ({"level": x} for x in (np.float32(3), np.arange(2), {3}))
    rest = {"response": "", "answer": "", "finished": True}
    right, wrong, failed = pool.judge([rest | {"columns": x} for x in columns])
    assert (right, wrong) == (Verdict(True), Verdict(False))
    assert failed.error.startswith("error: TypeError: workers cannot be sent a")


def processes(argument):
  """Returns processes that were started with an argument."""
  found = psutil.process_iter(["cmdline"])
  return [p for p in found if argument in (p.info["cmdline"] or ())]


class TestHostile:
  def test_no_response_reaches_the_verdicts_after_it(self, pool):
    texts = ["monkey", "a", "wrong"]
    verdicts = judge(pool, texts, ["a"] * 3, [True] * 3)
    assert verdicts == [Verdict(text == "a", text) for text in texts]

  def test_no_daemon_outlives_its_response(self, pool):
    assert judge(pool, ["daemon"], ["a"], [True]) == [Verdict(True)]
    assert not processes(_LONG)

  def test_each_costs_its_own_sample_and_leaves_nothing(self):
    expected = {
      **dict.fromkeys(["a", "", "print", "babble"], ""),
      **dict.fromkeys(["hang", "count", "stubborn", "breed"], "timeout"),
      **dict.fromkeys(["die", "segfault"], "crash"),
      **dict.fromkeys(["raise", "devour", *_NO_VERDICTS], "error"),
    }
    texts = [text for name in expected for text in (name, "a")]
    here = psutil.Process()
    descriptors, children = here.num_fds(), set(here.children())
    with contextlib.closing(
      rewards.RewardPool(moody, workers=2, deadline_s=2.0)
    ) as pool:
      verdicts = judge(pool, texts, ["a"] * len(texts), [True] * len(texts))
    kinds = [(v.error or "").partition(":")[0] for v in verdicts]
    assert kinds == [expected[text] for text in texts]
    assert [v.correct for v in verdicts] == [text == "a" for text in texts]
    assert here.num_fds() == descriptors
    assert set(here.children()) <= children and not processes(_LONG)

  def test_many_that_hang_do_not_outlast_the_batch(self):
    pool = rewards.RewardPool(
      moody, workers=2, deadline_s=30.0, batch_deadline_s=1.0
    )
    with contextlib.closing(pool):
      texts = ["a", "hang", "hang", "hang", "a"]
      verdicts = judge(pool, texts, ["a"] * 5, [True] * 5)
    assert verdicts[0] == Verdict(True, "a")
    assert [v.error for v in verdicts[1:]] == ["timeout"] * 4

  def test_nothing_is_left_when_the_trainer_is_killed(self):
    program = (
      "import pool_test as t; from jaxrl_llm import rewards\n"
      "pool = rewards.RewardPool(t.moody, workers=2, deadline_s=600.0)\n"
      "t.judge(pool, ['breed', 'hang'], ['a'] * 2, [True] * 2)"
    )
    tests = pathlib.Path(__file__).parents[1]
    path = os.pathsep.join(map(str, [tests.parent, tests, tests / "rewards"]))
    trainer = subprocess.Popen(
      [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}
    )
    until(lambda: len(processes(_LONG)) == 20)
    below = psutil.Process(trainer.pid).children
    until(lambda: len(below(recursive=True)) == 24)  # Two workers, two calls.
    left = below(recursive=True)
    trainer.kill()
    trainer.wait()
    until(lambda: not any(child.is_running() for child in left))


def until(true):
  """Waits until `true()` holds."""
  end = time.monotonic() + 60
  while not true():
    assert time.monotonic() < end
    time.sleep(0.1)
