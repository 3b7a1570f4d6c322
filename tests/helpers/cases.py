"""Tables of cases, one file of tests/cases for each kind of input."""

import pathlib
import tomllib

import pytest

_FOLDER = pathlib.Path(__file__).parents[1] / "cases"


def load(name):
  """Returns table -> rows of tests/cases/NAME.toml."""
  return tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))


def table(names, rows):
  """Parametrizes a test; values that a row lacks at its end are None."""
  count = names.count(",") + 1
  filled = [[*row, *[None] * (count - len(row))] for row in rows]
  return pytest.mark.parametrize(names, filled if count > 1 else rows)
