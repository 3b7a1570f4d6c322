"""Four processes that train together name a slow or frozen one."""

import signal
import socket

import pytest
from helpers import processes, programs, tiny_run

from jaxrl_llm import metrics
from jaxrl_llm.system import signals
from jaxrl_llm.trainer import loop

_REWARD = """
import pathlib
import time

import jax
from jaxrl_llm import register


def sleepy(response):
  slow = pathlib.Path(__file__).with_name(f"slow{jax.process_index()}").exists()
  # Long, so that few steps pass before the slow host is noticed.
  time.sleep(0.3 if slow else 0.15)
  return float(len(response) % 2)


register.reward("sleepy", sleepy)
"""
_SETTINGS = {
  "estimator__name": "group",  # Without a critic there is less to compile.
  "data__prompts_per_step": 4,  # Each response sleeps.
  "mesh__data": 4,
  "optimizer__policy__micro_batch_size": 4,
  "optimizer__value__micro_batch_size": 4,
  "value__pretrain_steps": 0,
  "reward__name": "sleepy",
  "eval__every": 1000,
  "eval__samples": 4,
  "eval__problems": 4,
  "run__steps": 1000,
}


def start(model, folder):
  (folder / "reward.py").write_text(_REWARD)
  flags = tiny_run.flags(model, folder / "run", **_SETTINGS)
  return processes.start(
    "scripts/train.py",
    *(*flags, f"--plugin={folder / 'reward.py'}"),
    count=4,
    devices=1,
    folder=folder,
    patience_s=100,
  )


def rows(folder):
  return metrics.read_rows(folder / "run/metrics.jsonl")


def said(folder):
  return (folder / "0.log").read_text()


@pytest.mark.slow(minutes=0.7)
def test_one_that_is_frozen_and_one_that_is_slow_are_named(model, tmp_path):
  started = start(model, tmp_path)
  programs.wait_for_lines(tmp_path / "run/metrics.jsonl", 3, started)
  assert "suspect host" not in said(tmp_path)
  started[2].send_signal(signal.SIGSTOP)
  frozen = f"2-{socket.gethostname()}"
  named = lambda: f"suspect host {frozen}: silent since 20" in said(tmp_path)
  programs.wait_until(named, "the frozen one", seconds=90)
  started[2].send_signal(signal.SIGCONT)
  suspected = lambda host: rows(tmp_path)[-1].get("host/suspect") == host
  programs.wait_until(lambda: suspected(2), "its row")
  (tmp_path / "slow3").touch()
  programs.wait_until(lambda: suspected(3), "the row of the slow one")
  (line,) = [s for s in said(tmp_path).splitlines() if "suspect host 3" in s]
  assert "host/reward_s is " in line and " since 20" in line
  assert rows(tmp_path)[-1]["health/suspect_host"] == 1
  assert "warning at step" in said(tmp_path)
  started[1].send_signal(signal.SIGINT)
  assert processes.wait(started) == [130] * 4, said(tmp_path)
  assert "saved; rerun with the same --workdir to continue" in said(tmp_path)


def test_a_run_that_a_suspect_ended_exits_with_75(model, tmp_path, monkeypatch):
  monkeypatch.setattr(loop, "train", lambda *_, **__: signals.SUSPECT)
  assert programs.run("train", *tiny_run.flags(model, tmp_path))[0] == 75
