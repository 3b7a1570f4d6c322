"""Settings of the methods in `methods/`: keyword arguments of their functions.

They are read from the source, because importing a method imports JAX: the
function NAME of methods/NAME.py gives the keys `method.NAME.ARGUMENT`, with the
defaults of its keyword-only arguments and the meanings in its docstring.
"""

import ast
import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.config.schema import (
  FIXED,
  KEYS,
  NEW_PATH,
  PATH,
  SWITCH,
  Group,
  Key,
  Names,
  setting,
)

_FOLDER = pathlib.Path(__file__).parents[1] / "methods"


def names() -> tuple[str, ...]:
  """Returns the names of the methods in `methods/`."""
  return tuple(sorted(file.stem for file in _FOLDER.glob("[a-z]*.py")))


class _Methods(Names):
  """Names of methods: of `methods/`, registered ones, and FILE.py:NAME."""

  def __iter__(self) -> Iterator[str]:
    return iter((*names(), *super().__iter__(), "FILE.py:NAME"))

  def __str__(self) -> str:
    return f"FILE.py:NAME, a registered name or one of {', '.join(names())}"

  def __contains__(self, value: Any) -> bool:
    return (
      value in names() or ".py:" in str(value) or super().__contains__(value)
    )


class Method(Group, path="method"):
  """Methods that change the algorithm, and their settings."""

  use: tuple[Any, ...] = setting(
    (),
    _Methods("learner.core:METHODS"),
    "Methods that change the algorithm of estimator.name and loss.name, applied"
    " in order: functions of jaxrl_llm/methods/, registered ones, or NAME of a"
    " file, FILE.py:NAME.",
    FIXED,
    PATH,
  )


def _register(name: str) -> None:
  """Adds the settings of a method to `KEYS`."""
  source = (_FOLDER / f"{name}.py").read_text(encoding="utf-8")
  for node in ast.parse(source).body:
    if isinstance(node, ast.FunctionDef) and node.name == name:
      meanings = _meanings(ast.get_docstring(node) or "")
      for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults):
        kind = ast.unparse(argument.annotation)
        path = NEW_PATH if "NewPath" in kind else PATH if "Path" in kind else ""
        value, meaning = ast.literal_eval(default), meanings[argument.arg]
        # Files may be read in other places, but not appear in a resumed run.
        resume = SWITCH if path else FIXED
        KEYS[f"method.{name}.{argument.arg}"] = Key(
          value, None, meaning, resume, path
        )


def _meanings(docstring: str) -> dict[str, str]:
  """Returns the text on each argument in a docstring."""
  _, _, arguments = inspect.cleandoc(docstring).partition("Args:\n")
  arguments = arguments.partition("\n\n")[0]
  found = re.findall(r"(?m)^  (\w+): (.*(?:\n    .*)*)", arguments)
  return {name: " ".join(text.split()) for name, text in found}


for _name in names():
  _register(_name)
