"""Imports plugin files.

A plugin is imported before a config is validated. Its folder is added to
`sys.path` and the file is imported by its name, so that worker processes, which
are fresh interpreters, can import it too.
"""

import contextlib
import importlib
import importlib.util
import pathlib
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from jaxrl_llm.errors import InputError


def load(path: str) -> ModuleType:
  """Imports a plugin file, which registers its parts.

  Raises:
    InputError: The file cannot be read or raises, or its name is taken.
  """
  file = pathlib.Path(path).resolve()
  if not file.is_file():
    raise InputError(f"{file}: no such file; give a Python file, FILE.py")
  if file.suffix != ".py":
    raise InputError(f"{file}: its name must end in .py; rename the file")
  loaded = sys.modules.get(file.stem)
  if loaded is None and str(file.parent) not in sys.path:
    sys.path.append(str(file.parent))
  with user_code(path):
    found = importlib.util.find_spec(file.stem)
    if found is None or pathlib.Path(found.origin or "").resolve() != file:
      raise InputError(
        f"another module is named {file.stem!r}; rename the file"
      )
    return importlib.import_module(file.stem)


@contextlib.contextmanager
def user_code(path: str) -> Iterator[None]:
  """Turns any error of a user's file into an InputError with file and line."""
  try:
    yield
  except (Exception, SystemExit) as error:  # User code may raise anything.
    text = (str(error).splitlines() or [""])[0]
    if not isinstance(error, InputError):
      text = f"{type(error).__name__}: {text}"
    line = _line(error, pathlib.Path(path).resolve())
    raise InputError(f"{path}{line}: {text}") from error


def check_trusted(owner: Any, files: Iterable[str]) -> None:
  """Checks that a user has given the code that somebody's settings name.

  Args:
    owner: path of the settings, for the message.
    files: Python files that they name; those with the name of an imported
      module are not run, or have been given.

  Raises:
    InputError: A file would run that the user has not given.
  """
  stem = lambda file: pathlib.Path(file).stem
  if unknown := [file for file in files if stem(file) not in sys.modules]:
    raise InputError(
      f"{owner}: its settings name code that would run here:"
      f" {', '.join(unknown)}; read it and give --plugin=FILE.py for each file,"
      " or --trust_code (load(..., trust_code=True)) if you trust the run"
    )


def merged(recorded: Iterable[str], given: Iterable[str]) -> tuple[str, ...]:
  """Combines the recorded plugin files of a run with the given ones.

  A given file replaces a recorded one of the same name, which may have moved:
  two files of the same name cannot both be imported.
  """
  files = (*recorded, *given)
  return tuple({pathlib.Path(file).name: file for file in files}.values())


def _line(error: BaseException, file: pathlib.Path) -> str:
  """Returns ', line N' with the line of the file that raised."""
  frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
  lines = [f.lineno for f in frames if pathlib.Path(f.filename) == file]
  if isinstance(error, SyntaxError) and error.lineno:  # None: a null byte.
    lines.append(error.lineno)
  return f", line {lines[-1]}" if lines else ""
