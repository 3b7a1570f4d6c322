"""The programs of the project. Installed, NAME.py is the command jaxrl-NAME.

The other folders hold what the programs are made of; `dev` has the programs of
developers, which are not installed.
"""

import pathlib
import runpy
import sys


def main() -> None:
  """Runs the program whose command this process is, as `python -m` would."""
  # The folder that Python adds to the path of a program run by its path.
  sys.path.insert(0, str(pathlib.Path(__file__).parent))
  name = pathlib.Path(sys.argv[0]).name.removeprefix("jaxrl-")
  runpy.run_module(f"{__name__}.{name}", run_name="__main__", alter_sys=True)
