"""Helps programs: their flags, one line for bad input, tables as they grow."""

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable

from jaxrl_llm.errors import InputError


def make_parser(text: str) -> argparse.ArgumentParser:
  """Makes a parser of flags whose help is the docstring of a program."""
  return argparse.ArgumentParser(
    description=text, formatter_class=argparse.RawDescriptionHelpFormatter
  )


def one_line(main: Callable[..., int | None]) -> Callable[..., int]:
  """Has the main function of a program refuse bad input in one line.

  Args:
    main: gets the arguments, those of the command line if None, and returns
      the exit code; None is 0.

  Returns:
    The function; it returns 2 if a file or a flag cannot be used.
  """

  @functools.wraps(main)
  def run(arguments: list[str] | None = None) -> int:
    name = pathlib.Path(main.__code__.co_filename).stem
    try:
      return main(arguments) or 0
    except ImportError as error:
      if "matplotlib" not in str(error.name):
        raise
      said = "matplotlib is missing: pip install -e '.[plot]'"
    except (InputError, OSError) as error:
      said = str(error)
    print(f"{name}: {said}", file=sys.stderr)
    return 2

  return run


class Table:
  """A Markdown table that is printed row by row, as its numbers come."""

  def __init__(self, titles: str):
    """Prints the titles of the columns, given as `one | another`."""
    self.row(*titles.split(" | "))
    self.row(*["---"] * len(titles.split(" | ")))

  def row(self, *cells: object) -> None:
    """Prints a row."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
