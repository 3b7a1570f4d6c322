"""Several processes train like one that has all of their devices."""

import pathlib
import shutil
import signal
import socket

import jax
import numpy as np
import pytest
from helpers import configs, processes, programs, tiny_run

from jaxrl_llm import fleet, metrics
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build, loop, meshes

_TESTS = pathlib.Path(__file__).parent
_STEPS = 4
# The learner has the first half of the devices, the sampler the other half.
_APART = {
  "mesh.data": 2,
  "mesh.fsdp": 2,
  "sampler.mesh.data": 2,
  "sampler.mesh.tensor": 2,
}


def meet(folder, *flags, **more):
  """Starts two processes that connect to each other."""
  program = _TESTS / "meet.py"
  return processes.start(program, *flags, count=2, folder=folder, **more)


def test_what_one_knows_all_know(tmp_path):
  started = meet(tmp_path, f"--folder={tmp_path}", devices=2)
  codes = processes.wait(started)
  texts = [(tmp_path / f"{i}.log").read_text() for i in range(2)]
  assert codes == [0, 0], texts
  assert all("met" in text for text in texts)
  assert not any("Traceback" in text for text in texts)


def test_other_settings_in_another_process_are_refused(model, tmp_path):
  started = processes.start(
    "scripts/train.py",
    *tiny_run.flags(model, tmp_path / "run"),
    count=2,
    devices=1,
    folder=tmp_path,
    last=["--config.loss.clip_value=0.5"],
  )
  assert processes.wait(started) == [2, 2]
  for log in (tmp_path / f"{i}.log" for i in range(2)):
    (line,) = log.read_text().splitlines()
    assert line.startswith("error: process 1 has config.loss.clip_value: 0.5, ")
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("gone", range(2))
@pytest.mark.parametrize("how", ["dying", "frozen"])
def test_a_process_that_dies_or_freezes_is_named(tmp_path, how, gone):
  started = meet(tmp_path, f"--{how}={gone}", devices=1, patience_s=5)
  other = 1 - gone
  try:
    assert started[other].wait(60) == 1
  finally:
    for process in started:
      process.kill()
  text = (tmp_path / f"{other}.log").read_text()
  (line,) = [x for x in text.splitlines() if x.startswith("process ")]
  assert line.startswith(f"process {other} of 2 on ")
  assert f"do not answer: {gone}; start all of them again" in line
  assert not any(word in text for word in ("Traceback", "Fatal", "stack"))


class TestRefused:
  """Two threads would start programs in a different order in each process."""

  @pytest.fixture(autouse=True)
  def two(self, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)

  @pytest.fixture
  def config(self):
    config = configs.load("grpo")
    config.optimizer.policy.micro_batch_size = 8
    config.optimizer.value.micro_batch_size = 8
    return config

  @pytest.mark.parametrize(
    ("settings", "says"),
    [
      ({"schedule.lag": 1}, "sampler and learner cannot share devices"),
      ({"schedule.lag": 1, "sampler.mesh.data": -1}, "cannot share devices"),
      (
        {**_APART, "schedule.streaming": True, "sampler.exact": True},
        "without sampler.exact",
      ),
      ({**_APART, "sampler.mesh.data": 1}, "use 6 of 8 devices"),
      ({"mesh.data": 4}, "use 4 of 8 devices"),
    ],
  )
  def test_in_one_line(self, config, settings, says):
    meshes.make_meshes(config)
    config.update_from_flattened_dict(settings)
    with pytest.raises(InputError, match="several processes") as refused:
      meshes.make_meshes(config)
    assert says in str(refused.value)

  def test_not_if_they_alternate_or_lie_apart(self, config):
    config.schedule.lag, config.schedule.overlap = 1, False
    meshes.make_meshes(config)
    config.schedule.overlap = True
    config.update_from_flattened_dict(_APART)
    meshes.make_meshes(config)


@pytest.mark.slow(minutes=1)
def test_two_train_as_one_though_stopped_and_killed(model, tmp_path):
  """One of two gets a signal, one of the next two dies; one process resumes."""
  steps = 2 * _STEPS
  settings = {
    **tiny_run.EVALUATES_LIKE_A_STEP,
    "mesh__data": 2,
    "mesh__fsdp": 2,
    "optimizer__policy__micro_batch_size": 4,
    "optimizer__value__micro_batch_size": 4,
    "eval__every": 2,
    "run__steps": steps,
    "run__stuck_after_s": 120,
  }
  run = build.make_run(tiny_run.make_config(model, **settings))
  loop.train(run, tmp_path / "alone")
  folder = tmp_path / "two"
  start = lambda: processes.start(
    "scripts/train.py",
    *tiny_run.flags(model, folder, **settings),
    count=2,
    devices=2,
    folder=tmp_path,
    patience_s=10,
  )
  started = start()
  wait_for_step(folder, 1)
  started[1].send_signal(signal.SIGTERM)
  texts = logs(tmp_path)
  assert processes.wait(started) == [128 + signal.SIGTERM] * 2, texts
  assert "saved; rerun with the same --workdir to continue" in logs(tmp_path)[0]
  done = len(tiny_run.comparable(folder))
  assert done < steps
  check_times(folder / "hosts", range(done))
  started = start()
  wait_for_step(folder, done, 2)
  started[1].kill()
  assert processes.wait(started[:1], 60) == [1]
  said = logs(tmp_path)[0]
  assert "process 0 of 2" in said and "do not answer: 1; start all" in said
  check_times(folder / "hosts_before", range(done))
  hosts = fleet.read_reports(folder / "hosts").hosts.values()
  assert [rows[0]["step"] for rows in hosts] == [done] * 2
  assert metrics.read_rows(folder / "metrics.jsonl")[-1]["step"] < steps
  # A single process has no others to compare with.
  times = tiny_run.snapshot(folder / "hosts")
  loop.train(run, folder)
  assert tiny_run.snapshot(folder / "hosts") == times
  assert "host/suspect" not in metrics.read_rows(folder / "metrics.jsonl")[-1]
  check_equal(folder, tmp_path / "alone", steps)


RUNS = {
  "a lag, windows, a drafter, a calculator and a repeated step": {
    # A process for each device: both sides are sharded over two of them.
    "mesh.data": 1,
    "sampler.mesh.tensor": 1,
    "schedule__lag": 1,
    "schedule__window": 5,
    "sampler__drafter": "prompt_lookup",
    "sampler__num_draft_tokens": 1,
    "environment__name": "calculator",
    "environment__max_turns": 3,
    "sampler__stop": ("=",),
    "run__replay_every": 2,
    "checkpoint__keep": _STEPS + 1,
  },
  "streaming, with a device each": {
    **{key: 1 for key in _APART},
    "schedule__streaming": True,
    "estimator__name": "group",  # Without a critic there is less to compile.
    "loss__nll_coefficient": 0.0,
    "optimizer__policy__mini_batch": 32,
  },
}


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize("features", RUNS)
def test_learner_and_sampler_in_processes_of_their_own(
  model, tmp_path, features
):
  settings = {
    **_APART,
    **tiny_run.EVALUATES_LIKE_A_STEP,
    "optimizer__policy__micro_batch_size": 4,
    "optimizer__value__micro_batch_size": 4,
    "value__pretrain_steps": 0,
    "run__steps": _STEPS,
    **RUNS[features],
  }
  devices = 4 if "schedule__lag" in settings else 2
  alone = lambda: build.make_run(tiny_run.make_config(model, **settings))
  loop.train(alone(), tmp_path / "alone")
  start = lambda count: processes.start(
    "scripts/train.py",
    *tiny_run.flags(model, tmp_path / "run", **settings),
    count=count,
    devices=devices // count,
    folder=tmp_path,
  )
  if "schedule__lag" in settings:
    # Started in one process, resumed in four, then in one again.
    later = shutil.ignore_patterns(*map(str, range(2, _STEPS + 1)))
    shutil.copytree(tmp_path / "alone", tmp_path / "run", ignore=later)
    rows = tmp_path / "run" / "metrics.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(True)[:2]))
    started = start(4)
    wait_for_step(tmp_path / "run", 2, 4)
    started[-1].kill()
    codes = processes.wait(started, 90)
    assert codes[0] == 1 and codes[-1] == -signal.SIGKILL, logs(tmp_path)
    assert all(codes) and "resumed from step 1" in logs(tmp_path)[0]
    assert len(metrics.read_rows(rows)) <= _STEPS
    half = 2
    loop.train(alone(), tmp_path / "run")
  else:
    half = 1
    assert processes.wait(start(2)) == [0, 0], logs(tmp_path)
  roles = fleet.read_reports(tmp_path / "run/hosts").roles
  assert roles == ["learner"] * half + ["sampler"] * half
  check_equal(tmp_path / "run", tmp_path / "alone")


def logs(folder):
  """Returns the output of each process."""
  return [file.read_text() for file in sorted(folder.glob("*.log"))]


def wait_for_step(workdir, step, count=0):
  """Waits for the row of a step and for the times of `count` processes."""
  rows, hosts = workdir / "metrics.jsonl", workdir / "hosts"

  def written():
    if not rows.exists() or rows.read_bytes().count(b"\n") <= step:
      return False
    times = [file.read_bytes() for file in hosts.glob("*.jsonl")]
    return sum(b"\n" in text for text in times) >= count

  programs.wait_until(written, "a step")


def check_times(folder, steps):
  """Checks each process's times of the steps, in total and without waiting."""
  reports = fleet.read_reports(folder)
  hosts = reports.hosts
  assert list(hosts) == [f"{i}-{socket.gethostname()}" for i in range(2)]
  for rows in hosts.values():
    assert [row["step"] for row in rows] == list(steps)
    for row in rows:
      parts = {k for k in row if k.startswith("host/")}
      assert row["step"] == 0 or parts >= {"host/reward_s", "host/generate_s"}
      for part in parts:
        assert 0 <= row[part] <= row[part.replace("host/", "time/")]
  own, took, names = reports.phases()
  assert own.shape == (2, len(steps), len(names)) and (took > 0).all()


def check_equal(workdir, other, steps=_STEPS):
  """Checks for equal tokens, and equal losses up to the order of sums."""
  shown, same = (
    metrics.read_rows(folder / "samples.jsonl") for folder in (workdir, other)
  )
  for name in ("advantage", "value", "logprob_diff"):
    found, wanted = (
      sum([row.pop(name, []) for row in rows], []) for rows in (shown, same)
    )
    np.testing.assert_allclose(
      np.array(found, float), np.array(wanted, float), rtol=1e-4, atol=2e-5
    )
  assert shown == same and "tokens" in shown[-1]
  rows, expected = map(tiny_run.comparable, (workdir, other))
  assert len(rows) == len(expected) == steps + 1
  for row, same in zip(rows, expected):
    assert row.keys() == same.keys()
    for name, value in row.items():
      # Values near rounding error, such as a KL of 1e-7, may differ.
      np.testing.assert_allclose(value, same[name], rtol=1e-4, atol=2e-6)
