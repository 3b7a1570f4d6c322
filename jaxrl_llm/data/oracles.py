"""Oracles: functions that find the first wrong step of a response."""

import itertools
import re
from collections.abc import Callable

from jaxrl_llm.data.tasks import Example
from jaxrl_llm.errors import InputError

# (example, text of a wrong response) -> the text before the first wrong step,
# and the corrected step; None if it finds no wrong step.
Oracle = Callable[[Example, str], tuple[str, str] | None]


def first_wrong_line(example: Example, text: str) -> tuple[str, str] | None:
  """Oracle of chain_sum and remainder, whose steps end with `;`."""
  if not isinstance(example.completion, str):
    raise InputError(
      f"{example.id}: the oracle 'lines' needs a solution whose steps end with"
      " ';'; register.oracle adds one for your data"
    )
  written = re.findall("[^;]*;", text)
  right = re.findall("[^;]*;", example.completion)
  for place, (step, own) in enumerate(
    itertools.zip_longest(right, written[: len(right)])
  ):
    if step != own:
      return "".join(right[:place]), step
  return None


ORACLES: dict[str, Oracle] = {"lines": first_wrong_line}
