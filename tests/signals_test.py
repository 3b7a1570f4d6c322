"""A signal is answered at once, even if the main thread is busy."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from jaxrl_llm.system import processes, signals

_ROOT = pathlib.Path(__file__).parents[1]
_PROGRAM = """
import hashlib
from jaxrl_llm.system import signals
with signals.stop_on_signal() as stopped:
  stopped.doing = "step 7"
  print("ready", flush=True)
  {body}
"""
_HANGING = {
  # Compiled code that does not let Python handle signals until it returns.
  "compiled": "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",
  # Such as a user-defined reward.
  "python": "while True: pass",
}


@pytest.mark.parametrize("name", _HANGING)
def test_the_first_is_answered_and_the_second_ends(name):
  process = subprocess.Popen(
    [sys.executable, "-c", _PROGRAM.format(body=_HANGING[name])],
    env=os.environ | {"PYTHONPATH": str(_ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    # Neither of the two ends on its own: the message appears meanwhile.
    lines = [process.stderr.readline() for _ in range(2)]
    assert lines == ["\n", "finishing step 7; press Ctrl-C again to stop now\n"]
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) in (-signal.SIGINT, 128 + signal.SIGINT)
  finally:
    process.kill()
    process.communicate()


def test_handlers_come_back(capfd):
  names = (signal.SIGINT, signal.SIGTERM)
  before = [signal.getsignal(name) for name in names]
  for number in names:
    with signals.stop_on_signal() as stopped:
      assert stopped.signal == 0
      os.kill(os.getpid(), number)
      assert stopped.signal == number
    assert [signal.getsignal(name) for name in names] == before
    # The thread that answers has ended.
    assert "press Ctrl-C again" in capfd.readouterr().err


def test_another_thread_changes_no_handler():
  before, seen = signal.getsignal(signal.SIGINT), []

  def run():
    with signals.stop_on_signal() as stopped:
      seen.append((stopped.signal, signal.getsignal(signal.SIGINT)))

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert seen == [(0, before)]


def test_one_that_comes_while_the_processes_meet_is_kept(monkeypatch):
  sent = []

  def gather(value):
    if not sent:
      sent.append(signal.raise_signal(signal.SIGTERM))
    return [value, 0]

  monkeypatch.setattr(processes, "gather", gather)
  with signals.stop_on_signal() as stopped:
    agreed = [stopped.agreed() for _ in range(3)]
  assert agreed == [0, signal.SIGTERM, signal.SIGTERM]


def test_other_signals_are_passed_over(capfd):
  before = signal.signal(signal.SIGUSR1, lambda *_: None)
  try:
    with signals.stop_on_signal() as stopped:
      os.kill(os.getpid(), signal.SIGUSR1)
  finally:
    signal.signal(signal.SIGUSR1, before)
  assert stopped.signal == 0 and capfd.readouterr().err == ""


def test_a_closed_terminal_sends_several_that_end_nothing_at_once(capfd):
  before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Not as with nohup.
  try:
    with signals.stop_on_signal() as stopped:
      for _ in range(3):
        os.kill(os.getpid(), signal.SIGHUP)
      os.kill(os.getpid(), signal.SIGPIPE)
      os.kill(os.getpid(), signal.SIGTERM)
  finally:
    signal.signal(signal.SIGHUP, before)
  assert stopped.signal == signal.SIGTERM
  # Once for the terminal, and once for the request.
  assert capfd.readouterr().err.count("finishing the current work") == 2


def test_ignored_ones_stay_so():  # As with nohup.
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    with signals.stop_on_signal() as stopped:
      os.kill(os.getpid(), signal.SIGHUP)
    assert stopped.signal == 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
  finally:
    signal.signal(signal.SIGHUP, before)
