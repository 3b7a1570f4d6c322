"""Runs a program of scripts/: `python -m jaxrl_llm NAME [flags]`."""

import ast
import runpy
import sys

from jaxrl_llm.config import hints
from jaxrl_llm.system import streams


def main() -> None:
  """Runs the program that the first argument names, or lists all programs."""
  names = {x.stem: x for x in sorted(hints.folder("scripts").glob("[!_]*.py"))}
  name, *_ = [*sys.argv[1:], "--help"]
  if name in ("-h", "--help"):
    streams.protect()  # As of programs: `| head` ends.
    print(__doc__, end="\n\n")
    for name, file in names.items():
      text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
      print(f"  {name:12} {text.splitlines()[0]}")
    return
  if name not in names:
    choices = ", ".join(names)
    print(f"error: no program {name!r}; choose {choices}", file=sys.stderr)
    sys.exit(2)
  del sys.argv[0]
  sys.path.insert(0, str(names[name].parent))
  runpy.run_path(str(names[name]), run_name="__main__")


if __name__ == "__main__":
  main()
