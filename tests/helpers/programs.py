"""Programs that tests start."""

import contextlib
import io
import json
import os
import pathlib
import runpy
import subprocess
import sys
import time

import grain.python  # noqa: F401 (It defines flags, which must stay.)
from absl import flags
from parts import command_line

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# As in tests/conftest.py, except for the number of devices: to compile fast.
FLAGS = " ".join(
  flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag
)


# Each line of input starts a process forked from this one, which has imported
# modules and started no threads. Its exit code is printed.
_FORKS = """
import json, os, sys
{imports}

for line in sys.stdin:
  child = os.fork()
  if not child:
    break
  _, status = os.waitpid(child, 0)
  print(os.waitstatus_to_exitcode(status), flush=True)
else:
  sys.exit()
given = json.loads(line)
{code}
"""


def environment(path=_ROOT, **more):
  """Returns the environment of a program with one device, as on a laptop."""
  return os.environ | {"PYTHONPATH": str(path), "XLA_FLAGS": FLAGS} | more


def environment_of_tests():
  """Returns the environment of a program that imports modules of the tests."""
  folders = (_ROOT / x for x in (".", "tests", "scripts/dev"))
  return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def environment_of_users():
  """Returns the environment without flags for fast compilation."""
  own = environment()
  return {k: v for k, v in own.items() if k not in ("XLA_FLAGS", "NPROC")}


@contextlib.contextmanager
def forks(imports, code, env, log):
  """Yields (*values) -> exit code of Python code, in which they are `given`.

  Args:
    imports: lines that are run once.
    code: lines that are run in a new process for each call.
    env: environment.
    log: file for errors.
  """
  with log.open("w") as errors:
    server = subprocess.Popen(
      [sys.executable, "-c", _FORKS.format(imports=imports, code=code)],
      env=env,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=errors,
      text=True,
    )

  def run(*values):
    print(json.dumps(values), file=server.stdin, flush=True)
    return int(server.stdout.readline())

  with server:
    yield run
    server.stdin.close()


def finish(program, *arguments, cwd=_ROOT, env=None, code=0):
  """Runs a Python program to its end in a separate process.

  Args:
    program: path below the project's root, or "-c" or "-m".
    *arguments: arguments of the program.
    cwd: working directory.
    env: environment; by default with one device.
    code: expected exit code.

  Returns:
    Standard output and standard error.
  """
  if program not in ("-c", "-m"):
    program = _ROOT / program
  done = subprocess.run(
    [sys.executable, program, *map(str, arguments)],
    cwd=cwd,
    env=environment() if env is None else env,
    capture_output=True,
    text=True,
    timeout=1800,
  )
  assert done.returncode == code, done.stdout[-9999:] + done.stderr
  return done.stdout, done.stderr


def compiled(program):
  """Returns the report of a program that compiles for absent devices."""
  path = [_ROOT, _ROOT / "scripts", os.environ.get("PYTHONPATH", "")]
  own = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
  own["PYTHONPATH"] = os.pathsep.join(map(str, path))
  # Compilers for accelerators reject the flags of the CPU compiler.
  kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  shown, _ = finish(program, env=kept | own)
  return json.loads(shown.splitlines()[-1])


def wait_until(true, what="something", seconds=600):
  """Waits until `true()` holds; `what` names it if it never does."""
  deadline = time.monotonic() + seconds
  while not true():
    assert time.monotonic() < deadline, what
    time.sleep(0.02)


def wait_for_lines(file, count, started=()):
  """Waits until a file has `count` lines; no started process ends before."""

  def written():
    ended = any(process.poll() is not None for process in started)
    if file.exists() and file.read_bytes().count(b"\n") >= count:
      return True
    assert not ended, f"a process ended before line {count} of {file}"
    return False

  wait_until(written, f"line {count} of {file}")


@contextlib.contextmanager
def _captured():
  """Yields what is printed and said, but not by garbage of earlier tests."""
  out, err, hook = io.StringIO(), io.StringIO(), sys.unraisablehook
  sys.unraisablehook = lambda _: None
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      yield out, err
    finally:
      sys.unraisablehook = hook


def refused(main, *flags):
  """Returns the line with which a program in this process rejects its flags.

  Args:
    main: the program's main function, or NAME of scripts/NAME.py (absl flags).
    *flags: its arguments.
  """
  if isinstance(main, str):
    code, _, said = run(main, *flags)
  else:
    with _captured() as (_, error):
      code = main([*map(str, flags)])
    said = error.getvalue()
  assert code == 2 and said.count("\n") == 1, said
  return said


def run(name, *arguments):
  """Runs scripts/NAME.py, a program with absl flags, in this process.

  Returns:
    Exit code, standard output and standard error.
  """
  known, argv = set(flags.FLAGS), sys.argv
  given = [f"{name}.py", *map(str, arguments)]
  sys.argv = command_line._prepared(given)
  with _captured() as (out, err):
    try:
      program = runpy.run_path(str(_ROOT / "scripts" / f"{name}.py"))
      check = program.get("check_flags", lambda: None)
      code = program["main"](command_line._parse(sys.argv, check))
    except SystemExit as error:
      code = error.code
    finally:
      sys.argv = argv
      for flag in set(flags.FLAGS) - known:  # Others define them too.
        delattr(flags.FLAGS, flag)
  return code, out.getvalue(), err.getvalue()
