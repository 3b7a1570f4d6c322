"""Suspects in a running job, from the files of its hosts."""

import functools
import itertools
import json
import pathlib
import time

import numpy as np
import pytest
from helpers import programs

from jaxrl_llm import fleet
from jaxrl_llm.fleet import live

_NOW, _EVERY_S = 1_800_000_000.0, 4.0


def write(file, rows):
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def of_samples(shares, ends=None):
  """Makes samples of hosts that stall for fractions [H, N] of the time."""
  hosts = {}
  for host, row in enumerate(shares):
    end = _NOW if ends is None else ends[host]
    hosts[f"{host}-vm"] = [
      {
        "time": end - _EVERY_S * (len(row) - 1 - i),
        "stalled": float(share),
        "memory_usage": 0.04,
      }
      for i, share in enumerate(row)
    ]
  return fleet.Reports(hosts)


def of_steps(seconds, step_s=6.0):
  """Makes steps of hosts with seconds [H, N] of work on rewards."""
  hosts = {}
  for host, row in enumerate(seconds):
    hosts[f"{host}-vm"] = [
      {
        "step": i,
        "time": _NOW - step_s * (len(row) - 1 - i),
        "time/step_s": step_s,
        "host/reward_s": float(own),
        "host/checkpoint_s": 5.0 * (host == 0),
      }
      for i, own in enumerate(row)
    ]
  return fleet.Reports(hosts)


def write_reports(folder, reports):
  for name, rows in reports.hosts.items():
    write(folder / f"{name}.jsonl", rows)


def write_samples(folder, *args):
  write_reports(folder / "samples", of_samples(*args))


def write_steps(folder, *args, **settings):
  write_reports(folder, of_steps(*args, **settings))


def find(folder):
  return {
    name: (alarm.metric, round(_NOW - alarm.since))
    for name, alarm in live.suspects(folder, _EVERY_S).items()
  }


class TestSuspects:
  def test_who_is_slow_in_a_phase(self, tmp_path):
    seconds = np.full((4, 10), 1.0)
    write_steps(tmp_path, seconds)
    assert find(tmp_path) == {}
    seconds[2, -3:] = 2.0
    write_steps(tmp_path, seconds)
    assert find(tmp_path) == {}  # Three may be chance.
    seconds[2, -4:] = 2.0
    write_steps(tmp_path, seconds)
    assert find(tmp_path) == {"2-vm": ("host/reward_s", 24)}
    write_steps(tmp_path, seconds, step_s=3.0)
    assert find(tmp_path) == {}  # Too short.

  def test_who_stalls(self, tmp_path):
    shares = np.full((4, 8), 0.1)
    shares[3, -4:] = 0.5
    write_samples(tmp_path, shares)
    assert find(tmp_path) == {"3-vm": ("stalled", 16)}
    shares[3, -2] = 0.35  # Normal on a busy machine.
    write_samples(tmp_path, shares)
    assert find(tmp_path) == {}

  def test_who_does_other_work_than_the_others_of_its_role(self, tmp_path):
    shares = np.full((6, 8), 0.1)
    shares[3:] = 0.6
    for role in ("learner", "sampler"):
      reports = of_samples(shares)
      for host, rows in enumerate(reports.hosts.values()):
        for row in rows:
          row["role"] = role if host < 3 else "sampler"
      write_reports(tmp_path / "samples", reports)
      assert bool(find(tmp_path)) == (role == "sampler")

  def test_all_that_stall_are_alike(self, tmp_path):
    write_samples(tmp_path, np.full((4, 8), 0.6))
    assert find(tmp_path) == {}

  @pytest.mark.parametrize("hosts", [2, 4])
  def test_who_is_silent(self, tmp_path, hosts):
    ends = np.full(hosts, _NOW)
    ends[1] -= 15
    write_samples(tmp_path, np.zeros((hosts, 4)), ends)
    assert find(tmp_path) == {}
    ends[1] -= 1
    write_samples(tmp_path, np.zeros((hosts, 4)), ends)
    assert find(tmp_path) == {"1-vm": ("silent", 16)}

  def test_a_storage_that_is_late_makes_nobody_silent(self, tmp_path):
    ends = [_NOW, *[_NOW - 40.0] * 3]
    write_samples(tmp_path, np.zeros((4, 4)), ends)
    assert find(tmp_path) == {}

  def test_who_takes_the_memory(self, tmp_path):
    reports = of_samples(np.zeros((4, 8)))
    for row in reports.hosts["2-vm"][-4:]:
      row["memory_usage"] = 0.09
    write_reports(tmp_path / "samples", reports)
    assert find(tmp_path) == {"2-vm": ("memory_usage", 16)}

  def test_files_that_are_not_there_or_being_written(self, tmp_path):
    assert find(tmp_path) == {}
    write_samples(tmp_path, np.zeros((3, 4)))
    write_steps(tmp_path, np.ones((3, 1)))
    (tmp_path / "0-vm.jsonl").write_text("")
    first = {"step": 7, "time": _NOW, "time/step_s": 1.0}
    write(tmp_path / "1-vm.jsonl", [first])  # No common step.
    (tmp_path / "samples" / "3-vm.jsonl").write_text('{"time": 18')
    assert find(tmp_path) == {}
    with (tmp_path / "samples" / "1-vm.jsonl").open("ab") as file:
      file.write(b"\0\0\n")
    assert find(tmp_path) == {}

  def test_long_files_are_read_from_their_end(self, tmp_path):
    shares = np.zeros((3, 2000))
    shares[1, -5:] = 1.0
    write_samples(tmp_path, shares)
    write_steps(tmp_path, np.ones((3, 2000)))
    assert find(tmp_path) == {"1-vm": ("stalled", 20)}

  def test_says_who_and_since_when(self, tmp_path):
    seconds = np.ones((3, 6))
    seconds[0, -4:] = 3.0
    write_steps(tmp_path, seconds)
    (line,) = live.describe(live.suspects(tmp_path, _EVERY_S))
    said = "host/reward_s is 3.0 times that of the other hosts since 20"
    assert line.startswith(f"suspect host 0-vm: {said}")


def test_a_healthy_hour_names_nobody(monkeypatch):
  """A host stalls for up to 12 s every few minutes, and 3 % of its rewards take
  three times as long; the first host does more. It is checked per sample.
  """
  rng, hosts, number = np.random.default_rng(0), 8, 900
  stalled = rng.beta(1, 30, (hosts, number)) + rng.uniform(0, 0.1, number)
  for host, begin in itertools.product(range(hosts), range(0, number, 50)):
    begin += rng.integers(40)
    stalled[host, begin : begin + rng.integers(1, 4)] = 0.7
  rewards = rng.lognormal(0, 0.15, (hosts, number))
  rewards *= np.where(rng.random((hosts, number)) < 0.03, 3, 1)
  rewards[0] *= 1.1
  read = lambda folder, tail: reports[folder.name]
  monkeypatch.setattr(live, "read_reports", read)
  for end in range(12, number):
    recent = slice(end - 12, end)
    reports = {
      "samples": of_samples(stalled[:, recent]),
      "hosts": of_steps(rewards[:, recent]),
    }
    assert find(pathlib.Path("hosts")) == {}, end
  rewards[5, recent] *= 2
  reports["hosts"] = of_steps(rewards[:, recent])
  assert set(find(pathlib.Path("hosts"))) == {"5-vm"}


class TestHostWatch:
  def test_samples_by_the_clock(self, tmp_path):
    file = tmp_path / "samples" / "1-vm.jsonl"
    begun = time.time()
    watch = fleet.HostWatch(tmp_path, "1-vm", 0.05, role="sampler")
    with watch.running():
      enough = lambda: file.exists() and file.read_bytes().count(b"\n") > 3
      programs.wait_until(enough, "samples")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
      assert begun <= row["time"] <= time.time()
      assert row["role"] == "sampler"
      assert 0 <= row["stalled"] <= 1 and 0 <= row["cpu_usage"] <= 1.1
      assert 0 < row["memory_usage"] < 1  # A CPU device reports no memory.
      assert "device_memory_usage" not in row
    # The thread has ended.
    assert file.read_bytes().count(b"\n") == len(rows)

  def test_a_clock_that_is_wrong(self, tmp_path):
    file, now = tmp_path / "samples" / "1-vm.jsonl", time.time()
    with fleet.HostWatch(tmp_path, "1-vm", 0.05, ahead_s=300).running():
      programs.wait_until(file.exists, "a sample")
      programs.wait_until(file.read_bytes, "its content")
    (row, *_) = map(json.loads, file.read_text().splitlines())
    assert row["time"] >= now + 300

  def test_names_a_suspect_once(self, tmp_path):
    told = []
    watch = fleet.HostWatch(tmp_path, "0-vm", _EVERY_S, told.append)
    ends = np.array([_NOW, _NOW, _NOW - 60])
    for silent in (60, 60, 0, 60):
      ends[2] = _NOW - silent
      write_samples(tmp_path, np.zeros((3, 4)), ends)
      watch._look()
    (line,) = told
    assert line.startswith("suspect host 2-vm: silent since 20")

  def test_a_metric_of_the_step_in_which_one_was_suspected(self, tmp_path):
    watch = fleet.HostWatch(tmp_path, "0-vm", _EVERY_S, lambda line: None)
    found = []
    for silent in (0, 60, 0, 0):
      write_samples(tmp_path, np.zeros((3, 4)), [_NOW, _NOW, _NOW - silent])
      watch._look()
      found.append(watch.metrics())
    # It was still a suspect when the third step began.
    suspect = {"host/suspect": 2}
    assert found == [{}, suspect, suspect, {}]

  def test_memory_is_no_sign_while_a_checkpoint_is_written(self, tmp_path):
    told, reports = [], of_samples(np.zeros((4, 4)))
    for row in reports.hosts["2-vm"]:
      row["memory_usage"] = 0.15
    write_reports(tmp_path / "samples", reports)
    for saving in (True, False):
      saves = functools.partial(bool, saving)
      fleet.HostWatch(tmp_path, "0-vm", _EVERY_S, told.append, saves)._look()
      assert bool(told) is not saving
    assert "2-vm: memory_usage is 3.0 times" in told[0]
