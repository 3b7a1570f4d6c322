"""Faults around scripts/train.py: rows, arrays and exit code stay the same."""

import os
import shutil
import signal

import pytest
from helpers import programs, tiny_run

_IMPORTS = """
import runpy
import jaxrl_llm.trainer.build, jaxrl_llm.trainer.loop, tensorboardX
from parts import command_line, dry_run
from absl import flags
"""
# Runs scripts/train.py with arguments; sets up its streams as named, and runs a
# line of Python before.
_CHILD = """
arguments, out, err, before = given
with open(os.devnull) as none:
  os.dup2(none.fileno(), 0)
for number, name in ((1, out), (2, err)):
  if name == "closed":
    os.close(number)
  elif name == "ended":  # Such as `| head`.
    ends = os.pipe()
    os.dup2(ends[1], number)
    os.close(ends[0])
  elif name == "unread":  # Such as a pager that waits for a key.
    os.dup2(os.pipe()[1], number)
    os.set_blocking(number, False)
    with __import__("contextlib").suppress(BlockingIOError):
      while True:
        os.write(number, b"x" * 4096)
    os.set_blocking(number, True)
  else:
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
if out == "closed":
  sys.stdout = None
sys.argv = arguments
exec(before)
runpy.run_path(arguments[0], run_name="__main__")
"""
_SERVICES = {
  "wandb": """
def init(**_): pass
def finish(): pass
def log(row, step):
  if step == 1:
    raise ConnectionError("no route to the service")
""",
  "trackio": """
import time
def init(**_): time.sleep(3600)
""",
}


@pytest.fixture(scope="module")
def train(tmp_path_factory, model):
  """train(folder, out, err, before, **changes) -> exit code, both outputs."""
  scratch = tmp_path_factory.mktemp("faults")
  for name, code in _SERVICES.items():
    (scratch / f"{name}.py").write_text(code)
  environment = programs.environment_of_tests()
  environment["PYTHONPATH"] += f":{scratch}:scripts"
  environment["XLA_FLAGS"] = programs.FLAGS

  def run(folder, out="", err="", before="", flags=None, **changes):
    logs = [scratch / f"{folder.name}.{name}" for name in ("out", "err")]
    for log in logs:
      log.write_text("")
    changes = {"run__steps": 3, "value__pretrain_steps": 0} | changes
    # A run's last step is always evaluated, and `plain` has two of them.
    changes = {"eval__every": 1} | changes
    changes = {"model__lora_rank": 2, "loss__kl_coefficient": 0.1} | changes
    # Without a critic there is less to compile.
    changes = {"estimator__name": "group"} | changes
    changes = tiny_run.EVALUATES_LIKE_A_STEP | changes
    if flags is None:
      flags = tiny_run.flags(model, folder, **changes)
    arguments = ["scripts/train.py", *map(str, flags)]
    streams = [x or str(log) for x, log in zip((out, err), logs)]
    code = start(arguments, *streams, before)
    return code, *(log.read_text() for log in logs)

  log = scratch / "server"
  with programs.forks(_IMPORTS, _CHILD, environment, log) as start:
    yield run


@pytest.fixture(scope="module")
def plain(tmp_path_factory, train):
  """A run of three steps; `at step 2` is a copy from before the last."""
  folder = tmp_path_factory.mktemp("plain") / "run"
  code, out, err = train(folder, run__steps=2)
  assert code == 0, out + err
  shutil.copytree(folder, folder.with_name("at step 2"))
  code, out, err = train(folder)
  assert code == 0, out + err
  assert "not written" not in out
  return folder


def check_same(folder, plain):
  tiny_run.assert_same_end(3, folder, plain)


@pytest.mark.slow(minutes=1)
class TestOutputs:
  def test_one_that_fills_up_or_raises(self, train, plain, tmp_path):
    folder = tmp_path / "run"
    (folder / "samples.jsonl").mkdir(parents=True)
    (folder / "tensorboard").write_text("")
    trackers = {"run__trackers": ("tensorboard", "wandb")}
    code, _, err = train(folder, out="/dev/full", **trackers)
    assert code == 0, err
    check_same(folder, plain)
    first, last = err.splitlines()
    assert first == "stdout: No space left on device; the run goes on"
    assert last.startswith("not written: ")
    assert " x samples.jsonl (OSError: [Errno 22] not a regular file" in last
    assert "1 x wandb (ConnectionError: no route to the service)" in last
    assert "4 x tensorboard (FileExistsError: " in last
    assert " lines of stdout (No space left on device)" in last

  def test_one_that_ends(self, train, plain, tmp_path):
    folder = tmp_path / "run"
    assert train(folder, out="closed", err="ended")[0] == 0
    check_same(folder, plain)

  def test_one_that_hangs(self, train, plain, tmp_path):
    folder = tmp_path / "run"
    before = (
      "from jaxrl_llm.metrics import outlets; from jaxrl_llm.system import"
      " streams; outlets.PATIENCE_S = streams.PATIENCE_S = 0.1"
    )
    code, out, err = train(
      folder, err="unread", before=before, run__trackers=("trackio",)
    )
    assert code == 0, out
    check_same(folder, plain)
    assert "4 x trackio (TimeoutError: no answer for 0.1 s)" in out


# Another program, or user code, fails in step N.
_FAILS = """
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # As without `nohup`.
from jaxrl_llm.trainer import loop
iterate = loop.iterate
def failing(run, states, *rest):
  if states.step + 1 == {step}:
    {what}
  return iterate(run, states, *rest)
loop.iterate = failing
"""


@pytest.mark.slow(minutes=0.5)
def test_whatever_ends_it_ends_it_saved(train, plain, tmp_path):
  folder, rarely = tmp_path / "run", {"checkpoint__every": 9}
  hang_up = "os.kill(os.getpid(), signal.SIGHUP)"
  code, out, _ = train(
    folder, before=_FAILS.format(step=1, what=hang_up), **rarely
  )
  assert code == 128 + signal.SIGHUP and "SIGHUP at step 1, saved" in out
  fails = _FAILS.format(step=3, what="raise RuntimeError('of a user')")
  code, out, err = train(folder, before=fails, **rarely)
  assert code == 1 and "RuntimeError: of a user" in err
  assert "resumed from step 1" in out and "an error; step 2 is saved" in out
  code, out, _ = train(folder, **rarely)
  assert code == 0 and "resumed from step 2" in out
  check_same(folder, plain)


@pytest.mark.slow(minutes=0.3)
def test_every_file_of_a_run_is_damaged(train, plain, tmp_path):
  folder = shutil.copytree(plain.with_name("at step 2"), tmp_path / "run")
  os.truncate(folder / "config.json", 1000)
  (folder / "base_model" / "tokenizer.json").unlink()
  flip(max((folder / "checkpoints/base").rglob("d/*"), key=size))
  rows = (folder / "metrics.jsonl").read_text().splitlines()
  (folder / "metrics.jsonl").write_text(
    "\n".join([rows[0], "?", *rows[1:], ""])
  )
  (folder / "samples.jsonl").unlink()
  (folder / "samples.jsonl").mkdir()
  only = ["--config.run.steps=3", f"--workdir={folder}"]
  code, out, err = train(folder, flags=only)
  assert code == 0, err
  check_same(folder, plain)
  assert "config.json was damaged: written again" in out
  assert "base_model was damaged: written again" in out
  assert "metrics.jsonl has damaged lines" in out
  assert "arrays differ from what was saved" in out
  assert "base: damaged (" in out and "written again from the model" in out
  names = "config.json", "base_model/tokenizer.json"
  for name in names:
    assert (folder / name).read_bytes() == (plain / name).read_bytes()


@pytest.mark.slow(minutes=0.2)
def test_damaged_weights_are_not_replaced_by_others(
  train, plain, model, tmp_path
):
  folder = shutil.copytree(plain.with_name("at step 2"), tmp_path / "run")
  other = shutil.copytree(model, tmp_path / "other")
  base = max((folder / "checkpoints/base").rglob("d/*"), key=size)
  for file in (base, other / "model.safetensors"):
    flip(file)
  before = tiny_run.snapshot(folder)
  given = [f"--workdir={folder}", f"--config.model.path={other}"]
  code, _, err = train(folder, flags=["--config.run.steps=3", *given])
  assert code == 2 and err.count("\n") == 1
  assert "base: damaged (" in err and f"), and {other}: its weights" in err
  assert "have changed since checkpoint 2 was saved; restore them" in err
  assert tiny_run.snapshot(folder) == before


def size(path):
  return path.stat().st_size


def flip(file):
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 4
  file.write_bytes(data)
