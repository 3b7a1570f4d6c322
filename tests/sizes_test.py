"""Limits functions, constructors, and what choosing a method costs."""

import ast
import functools
import pathlib

import pytest
import shape

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_LINES = 60  # Per function, without its docstring.
_ARGUMENTS = 8  # Per constructor, without self.

_FILES = sorted((_ROOT / "jaxrl_llm").rglob("*.py"))


@functools.cache
def _functions(path):
  """Returns all functions of a file, including methods and inner functions."""
  tree = ast.parse(path.read_text(encoding="utf-8"))
  kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
  return [n for n in ast.walk(tree) if isinstance(n, kinds)]


def _lines(function):
  """Returns the number of lines from `def` on, without the docstring."""
  lines = function.end_lineno - function.lineno + 1
  if ast.get_docstring(function) is not None:
    docstring = function.body[0]
    lines -= docstring.end_lineno - docstring.lineno + 1
  return lines


def _arguments(function):
  """Returns the number of arguments; *args and **kwargs count as one each."""
  given = function.args
  names = [*given.posonlyargs, *given.args, *given.kwonlyargs]
  return len(names) + sum(x is not None for x in (given.vararg, given.kwarg))


def _over(measure, most, names=""):
  """Returns `file: function` -> measure of the functions above a limit."""
  return {
    f"{path.relative_to(_ROOT)}: {function.name}": measure(function)
    for path in _FILES
    for function in _functions(path)
    if names in ("", function.name) and measure(function) > most
  }


def test_a_function_fits_one_screen():
  over = _over(_lines, _LINES)
  assert not over, f"split these functions of over {_LINES} lines: {over}"


def test_a_constructor_takes_few_arguments():
  over = _over(_arguments, _ARGUMENTS + 1, "__init__")
  assert not over, f"constructors of over {_ARGUMENTS} arguments: {over}"


# Measures of today; see scripts/dev/shape.py for their goals. Lower them.
_TODAY = {
  "named": 12,
  "tables": 12,
  "untyped_config": 5,
  "untyped": 258,
  "keys": 185,
  "lines": 25_189,
  "imported": 173,
  "frames": 13,
}


def _grown(measures):
  return {k: x for k, x in measures.items() if x > _TODAY[k]}


def test_choosing_costs_no_more_than_today():
  assert not _grown(shape.measures())


@pytest.mark.slow(minutes=0.5)
def test_a_step_imports_and_calls_no_more_than_today():
  assert not _grown(shape.of_a_run())
