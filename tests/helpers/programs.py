"""Programs that tests start."""

import contextlib
import io
import os
import pathlib
import runpy
import sys

from absl import flags
from parts import command_line

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# As in tests/conftest.py, but for the number of devices: they compile fast.
FLAGS = " ".join(
  flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag
)


def environment(path=_ROOT, **more):
  """That of a program with one device, as on a laptop."""
  return os.environ | {"PYTHONPATH": str(path), "XLA_FLAGS": FLAGS} | more


def run(name, *arguments):
  """Runs scripts/NAME.py, a program with absl flags, in this process.

  Returns:
    Exit code, output and errors.
  """
  known, argv = set(flags.FLAGS), sys.argv
  given = [f"{name}.py", *map(str, arguments)]
  sys.argv = command_line._prepared(given)
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      program = runpy.run_path(str(_ROOT / "scripts" / f"{name}.py"))
      check = program.get("check_flags", lambda: None)
      code = program["main"](command_line._parse(sys.argv, check))
    except SystemExit as error:
      code = error.code
    finally:
      sys.argv = argv
      for flag in set(flags.FLAGS) - known:  # Another program defines them too.
        delattr(flags.FLAGS, flag)
  return code, out.getvalue(), err.getvalue()
