"""Tests of scripts/train.py as users run it: interrupted, resumed, rejected."""

import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
from helpers import cases, programs, tiny_run
from parts import program

from jaxrl_llm import workdir

_PROGRAMS = cases.load("code")

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 10
# 64 blocks of 512 bytes: metrics can be written, checkpoints cannot.
_NO_LARGE_FILE = ("sh", "-c", 'ulimit -f 64; exec "$0" "$@"')


def test_ctrl_c_is_one_line(capsys):
  @program.one_line
  def main(arguments):
    raise KeyboardInterrupt

  assert main() == 128 + signal.SIGINT
  assert capsys.readouterr().err == "scripts_test: interrupted\n"


@pytest.fixture(scope="module")
def start(model, tmp_path_factory):
  """start(workdir, **changes) -> a running scripts/train.py."""
  folder = tmp_path_factory.mktemp("scripts")
  environment = programs.environment(
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0"
  )
  # Later processes load the programs that the first one compiled.
  environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
  processes = []

  def run(workdir, *flags, prefix=(), **changes):
    """Starts with the flags of a complete run, or with the given ones only."""
    settings = {
      "run__steps": STEPS,
      "run__samples_every": 0,
      "eval__every": 5,
      "estimator__name": "group",  # kill_test.py covers critics.
      "value__pretrain_steps": 0,
      **changes,
    }
    if flags:
      flags = [f"--workdir={workdir}", *flags]
    process = subprocess.Popen(
      [
        *prefix,
        sys.executable,
        "scripts/train.py",
        *(flags or tiny_run.flags(model, workdir, **settings)),
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


def finish(process, code=0):
  """Waits for a process to end without error; returns standard output."""
  output, errors = process.communicate(timeout=300)
  assert process.returncode == code, errors
  assert "Traceback" not in errors
  return output


def fail(process, code):
  """Waits for an exit with a one-line error; returns the line."""
  _, errors = process.communicate(timeout=300)
  assert process.returncode == code, errors
  assert errors.startswith("error: ") and errors.count("\n") == 1, errors
  return errors


@pytest.fixture(scope="module")
def finished(start, tmp_path_factory):
  """Folder of an uninterrupted run."""
  folder = tmp_path_factory.mktemp("whole")
  assert f"workdir {folder}" in finish(start(folder))
  assert (folder / "config.json").is_file()
  return folder


@pytest.fixture(scope="module")
def whole(finished):
  """Its rows."""
  rows = tiny_run.comparable(finished)
  assert [row["step"] for row in rows] == list(range(STEPS + 1))
  return rows


class TestResume:
  @pytest.mark.slow
  def test_flags_need_not_be_repeated(self, start, whole, finished, tmp_path):
    folder = pathlib.Path(shutil.copytree(finished, tmp_path / "run"))
    own = tmp_path / "own_parts.py"
    own.write_text("print('own parts')\n")
    flags = ["--config=configs/vapo.py", "--step=9", f"--plugin={own}"]
    output = finish(start(folder, *flags, "--config.checkpoint.every=5"))
    assert f"config.run.plugins: [] -> ['{own}']\n" in output
    assert "config.data.group_size keeps its value 4; --config has 8" in output
    assert "plugins keeps" not in output and "run.method" not in output
    assert "checkpoint.every keeps" not in output
    assert "resumed from step 9\n" in output
    assert "config.checkpoint.every: 1 -> 5\n" in output
    assert "checkpoints 10 and earlier rows are set aside in" in output
    assert tiny_run.comparable(folder) == whole
    assert tiny_run.comparable(folder / "set_aside_1") == whole
    before = tiny_run.snapshot(folder)
    (tmp_path / "moved").mkdir()
    moved = own.rename(tmp_path / "moved" / own.name)
    line = fail(start(folder, "--nodry_run"), 2)  # Only --workdir.
    assert f"{own}: no such file" in line
    output = finish(start(folder, f"--plugin={moved}"))
    assert "run is at its last step 10; raise run.steps to" in output
    assert "own parts\n" in output
    line = fail(start(folder, "--config=configs/grpo.py"), 2)
    assert "has a run of vapo; leave --config out or give another" in line
    line = fail(start(folder, "--step=7", f"--plugin={moved}"), 2)
    assert "no step 7; choose from 9, 10" in line
    assert tiny_run.snapshot(folder) == before

  @pytest.mark.slow
  def test_a_limit_on_files(self, start, finished, tmp_path):
    folder = pathlib.Path(shutil.copytree(finished, tmp_path / "run"))
    more = f"--config.run.steps={STEPS + 1}"
    line = fail(start(folder, more, prefix=_NO_LARGE_FILE), 1)
    assert "cannot write a checkpoint" in line
    assert "(ulimit -f)" in line
    assert workdir.steps(folder) == [STEPS - 1, STEPS]


@pytest.mark.parametrize(
  ("error", "code", "said"),
  [
    ("SystemExit(0)", 1, "leaving.py:5 called exit(0); raise an"),
    ("KeyboardInterrupt", 130, "stopped before training began; there is not"),
  ],
)
def test_foreign_code_does_not_end_it_with_0(
  start, tmp_path, error, code, said
):
  own = tmp_path / "leaving.py"
  own.write_text(_PROGRAMS["scripts_leaving"].format(error=error))
  source = {"run__plugins": f"('{own}',)", "data__source": "leaving"}
  process = start(tmp_path / "run", **source, data__settings="{}")
  assert said in fail(process, code)


@pytest.mark.slow
def test_a_signal_saves_and_exits_with_128_and_its_number(
  start, whole, tmp_path
):
  # SIGTERM: processes_test.py; a second signal: signals_test.py.
  number = signal.SIGINT
  process = start(tmp_path, checkpoint__every=100)
  programs.wait_for_lines(tmp_path / "metrics.jsonl", 3, [process])
  process.send_signal(number)
  assert f"stopped by {number.name}" in finish(process, 128 + number)
  rows = len(tiny_run.comparable(tmp_path))
  assert 3 <= rows <= STEPS
  assert (tmp_path / "checkpoints" / str(rows - 1)).is_dir()
  assert f"resumed from step {rows - 1}" in finish(start(tmp_path))
  assert tiny_run.comparable(tmp_path) == whole
