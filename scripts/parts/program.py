"""Command lines of programs: flags, one-line errors, Markdown tables."""

import argparse
import functools
import math
import pathlib
import signal
import sys
from collections.abc import Callable

from jaxrl_llm.errors import InputError

# Keywords of `add_argument` that several flags share.
REPEATED = {"action": "append", "default": []}
DTYPE = {"choices": ("float32", "bfloat16"), "default": "float32"}


def make_parser(text: str) -> argparse.ArgumentParser:
  """Returns a parser whose help text is the docstring of the program."""
  return argparse.ArgumentParser(
    description=text, formatter_class=argparse.RawDescriptionHelpFormatter
  )


def check_ranges(
  options: argparse.Namespace, **ranges: tuple[float, float]
) -> None:
  """Checks that flags are in their (minimum, maximum) ranges.

  Raises:
    InputError: a flag is out of range.
  """
  for name, (least, most) in ranges.items():
    value = getattr(options, name)
    if not least <= value <= most:
      bounds = f"{least}..{most}" if most < math.inf else f"at least {least}"
      raise InputError(f"--{name}={value} must be {bounds}")


def one_line(main: Callable[..., int | None]) -> Callable[..., int]:
  """Wraps the main function of a program to report bad input in one line.

  Args:
    main: takes the arguments (None: those of the command line) and returns the
      exit code (None: 0).

  Returns:
    The wrapped function; its exit code is 2 for an InputError or OSError, and
    130 after Ctrl-C.
  """

  @functools.wraps(main)
  def run(arguments: list[str] | None = None) -> int:
    name = pathlib.Path(main.__code__.co_filename).stem
    try:
      return main(arguments) or 0
    except KeyboardInterrupt:
      print(f"{name}: interrupted", file=sys.stderr)
      return 128 + signal.SIGINT
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
  """A Markdown table, printed row by row while the numbers are computed."""

  def __init__(self, titles: str):
    """Prints the header; titles are separated by ` | `."""
    self.row(*titles.split(" | "))
    self.row(*["---"] * len(titles.split(" | ")))

  def row(self, *cells: object) -> None:
    """Prints a row."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
