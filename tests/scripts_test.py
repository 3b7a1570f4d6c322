"""scripts/train.py as a user runs it: killed, interrupted, resumed."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tiny_run

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 10


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """start(workdir, **changes) -> a running scripts/train.py."""
  folder = tmp_path_factory.mktemp("scripts")
  model = tiny_run.write_model(folder / "tiny")
  environment = os.environ | {
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": "",  # One device, as on a laptop.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  # Every process after the first one loads what that one compiled.
  environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
  processes = []

  def run(workdir, **changes):
    settings = {"run__steps": STEPS, "run__samples_every": 0, "eval__every": 5}
    settings |= changes
    process = subprocess.Popen(
      [
        sys.executable,
        "scripts/train.py",
        *tiny_run.flags(model, workdir, **settings),
      ],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    processes.append(process)
    return process

  yield run
  for process in processes:
    process.kill()
    process.communicate()


def finish(process):
  """Waits for success; returns standard output."""
  output, errors = process.communicate(timeout=300)
  assert process.returncode == 0, errors
  assert "Traceback" not in errors
  return output


def wait_for_rows(process, workdir, count):
  """Returns as soon as metrics.jsonl has so many rows."""
  file = workdir / "metrics.jsonl"
  deadline = time.monotonic() + 300
  while not (file.exists() and file.read_bytes().count(b"\n") >= count):
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < deadline
    time.sleep(0.002)


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
  """Rows of an uninterrupted run."""
  workdir = tmp_path_factory.mktemp("whole")
  assert f"workdir {workdir}" in finish(start(workdir))
  assert (workdir / "config.json").is_file()
  rows = tiny_run.comparable(workdir)
  assert [row["step"] for row in rows] == list(range(STEPS + 1))
  return rows


class TestKill:
  def test_the_next_start_repeats_the_uninterrupted_run(
    self, start, whole, tmp_path
  ):
    process = start(tmp_path)
    wait_for_rows(process, tmp_path, 4)
    process.kill()
    process.wait()
    assert len(tiny_run.comparable(tmp_path)) < STEPS
    assert "resumed from step" in finish(start(tmp_path))
    assert tiny_run.comparable(tmp_path) == whole

  @pytest.mark.slow
  def test_again_and_again(self, start, whole, tmp_path):
    # Every life ends a little later, the first ones before any step.
    for life in range(8):
      process = start(tmp_path)
      if life < 3:
        time.sleep(life)
      else:
        wait_for_rows(process, tmp_path, life - 1)
      process.kill()
      process.wait()
    finish(start(tmp_path))
    assert tiny_run.comparable(tmp_path) == whole


@pytest.mark.slow
class TestSignal:
  @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
  def test_saves_and_exits_with_0(self, start, whole, tmp_path, number):
    process = start(tmp_path, checkpoint__every=100)
    wait_for_rows(process, tmp_path, 3)
    process.send_signal(number)
    assert f"stopped by {number.name}" in finish(process)
    rows = len(tiny_run.comparable(tmp_path))
    assert 3 <= rows <= STEPS
    assert (tmp_path / "checkpoints" / str(rows - 1)).is_dir()
    assert f"resumed from step {rows - 1}" in finish(start(tmp_path))
    assert tiny_run.comparable(tmp_path) == whole

  def test_the_second_one_ends_at_once(self, start, tmp_path):
    process = start(tmp_path, run__steps=10_000)
    wait_for_rows(process, tmp_path, 2)
    for _ in range(50):
      process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) in (0, -signal.SIGTERM)
