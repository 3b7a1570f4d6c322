"""Programs that tests start."""

import os
import pathlib

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# As in tests/conftest.py, but for the number of devices: they compile fast.
FLAGS = " ".join(
  flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag
)


def environment(path=_ROOT, **more):
  """That of a program with one device, as on a laptop."""
  return os.environ | {"PYTHONPATH": str(path), "XLA_FLAGS": FLAGS} | more
