"""Command-line programs; when installed, NAME.py is the command jaxrl-NAME.

`python -m jaxrl_llm NAME` runs them too. The subfolders contain the modules of
these programs; `dev` contains developer tools, which are not installed.
"""

import pathlib
import runpy
import sys

# Python does so when a script is run by its path, but not for `python -m`.
sys.path.insert(0, str(pathlib.Path(__file__).parent))


def main() -> None:
  """Runs the program named by this process's command, as `python -m` would."""
  name = pathlib.Path(sys.argv[0]).name.removeprefix("jaxrl-")
  runpy.run_module(f"{__name__}.{name}", run_name="__main__", alter_sys=True)
