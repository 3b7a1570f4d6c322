"""Two processes of four devices train as one of eight."""

import pathlib
import signal
import socket

import jax
import numpy as np
import pytest
from helpers import configs, processes, programs, tiny_run

from jaxrl_llm import fleet, metrics
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build, loop, meshes, validation

_TESTS = pathlib.Path(__file__).parent
_STEPS = 4


def test_what_one_knows_all_know(tmp_path):
  started = processes.start(
    _TESTS / "meet.py", count=2, devices=2, folder=tmp_path
  )
  codes = processes.wait(started)
  texts = [(tmp_path / f"{i}.log").read_text() for i in range(2)]
  assert codes == [0, 0], texts
  assert all("met" in text for text in texts)


@pytest.mark.parametrize("dying", range(2))
def test_a_process_that_dies_is_named(tmp_path, dying):
  started = processes.start(
    _TESTS / "meet.py", f"--dying={dying}", count=2, devices=1, folder=tmp_path
  )
  codes = processes.wait(started)
  other = 1 - dying
  text = (tmp_path / f"{other}.log").read_text()
  assert "Traceback" not in text and codes[other] != 0
  if "JAX distributed service detected fatal errors" in text:
    assert dying == 0  # Its clients notice that at once.
    return
  (line,) = [s for s in text.splitlines() if s.startswith("process ")]
  assert line.startswith(f"process {other} of 2 on ")
  assert f"do not answer: {dying}; start all of them again" in line
  assert codes[other] == 1 and "Fatal" not in text


class TestRefused:
  """What would come in another order in every process."""

  @pytest.fixture(autouse=True)
  def two(self, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)

  @pytest.mark.parametrize(
    ("settings", "says"),
    [
      ({"schedule.lag": 1}, "use schedule.overlap=False"),
      (
        {"schedule.streaming": True, "optimizer.policy.mini_batch": 512},
        "config.schedule.streaming=True",
      ),
      ({"sampler.drafter": "prompt_lookup"}, "set it to ''"),
      ({"run.replay_every": 3}, "set it to 0"),
    ],
  )
  def test_in_one_line(self, settings, says):
    config = configs.load("grpo")
    validation.validate(config)
    config.update_from_flattened_dict(settings)
    with pytest.raises(InputError, match="several processes") as refused:
      validation.validate(config)
    assert says in str(refused.value)

  def test_devices_that_do_nothing(self):
    config = configs.load("grpo")
    config.mesh.data = 4
    config.optimizer.policy.micro_batch_size = 4
    config.optimizer.value.micro_batch_size = 4
    with pytest.raises(InputError, match="uses 4 of 8 devices"):
      meshes.make_meshes(config)


@pytest.mark.slow(minutes=1)
class TestTraining:
  SETTINGS = {
    "mesh__data": 2,
    "mesh__fsdp": 2,
    "mesh__tensor": 2,
    "optimizer__policy__micro_batch_size": 4,
    "optimizer__value__micro_batch_size": 4,
    "run__steps": _STEPS,
    "run__stuck_after_s": 120,
  }

  @pytest.fixture(scope="class")
  def start(self, model):
    """A function that starts two processes that train in a folder."""
    return lambda folder: processes.start(
      "scripts/train.py",
      *tiny_run.flags(model, folder / "run", **self.SETTINGS),
      count=2,
      devices=4,
      folder=folder,
    )

  @pytest.fixture(scope="class")
  def run(self, model):
    """The run of one process, which is this one."""
    return build.make_run(tiny_run.make_config(model, **self.SETTINGS))

  @pytest.fixture(scope="class")
  def alone(self, run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    loop.train(run, folder)
    return folder

  def test_is_that_of_one_process_though_stopped_by_one_of_two(
    self, start, alone, tmp_path
  ):
    started = start(tmp_path)
    wait_for_step(tmp_path / "run", 1)
    started[1].send_signal(signal.SIGTERM)
    texts = logs(tmp_path)
    assert processes.wait(started) == [128 + signal.SIGTERM] * 2, texts
    assert "saved; the same --workdir goes on" in logs(tmp_path)[0]
    done = len(tiny_run.comparable(tmp_path / "run"))
    assert done <= _STEPS
    check_times(tmp_path / "run/hosts", range(done))
    assert processes.wait(start(tmp_path)) == [0, 0], logs(tmp_path)
    check_equal(tmp_path / "run", alone)
    check_times(tmp_path / "run/hosts", range(done, _STEPS + 1))
    check_times(tmp_path / "run/hosts_before", range(done))

  def test_goes_on_in_one_process_when_one_of_two_is_killed(
    self, start, run, alone, tmp_path
  ):
    started = start(tmp_path)
    wait_for_step(tmp_path / "run", 1)
    started[1].kill()
    assert processes.wait(started[:1], 60) == [1]
    said = logs(tmp_path)[0]
    assert "process 0 of 2" in said and "do not answer: 1; start all" in said
    loop.train(run, tmp_path / "run")
    check_equal(tmp_path / "run", alone)


def logs(folder):
  """What each process said."""
  return [file.read_text() for file in sorted(folder.glob("*.log"))]


def wait_for_step(workdir, step):
  """Until the row of a step is there."""
  rows = workdir / "metrics.jsonl"
  written = lambda: rows.exists() and rows.read_bytes().count(b"\n") > step
  programs.wait_until(written, "a step")


def check_times(folder, steps):
  """Each process has written its times of the steps, and of its own work."""
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


def check_equal(workdir, other):
  """The same tokens, and the same losses but for the order of sums."""
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
  assert len(rows) == len(expected) == _STEPS + 1
  for row, same in zip(rows, expected):
    assert row.keys() == same.keys()
    for name, value in row.items():
      # Of numbers near rounding, such as a KL of 1e-7, only that they are.
      np.testing.assert_allclose(value, same[name], rtol=1e-4, atol=2e-6)
