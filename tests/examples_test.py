"""Runs the examples in the docstrings of public functions."""

import doctest
import inspect
import re
import sys

import pytest

from jaxrl_llm import api, config, estimators, losses
from jaxrl_llm.methods.hl_gauss import categorical_value_loss

_NUMBER = re.compile(r"-?\d+\.?\d*")
_FUNCTIONS = [
  pytest.param(getattr(room, name), id=name)
  for room in (estimators, losses)
  for name in vars(room)
  if inspect.isfunction(getattr(room, name))
] + [config.method, api.load, categorical_value_loss]


class _Checker(doctest.OutputChecker):
  """Accepts numbers that differ in the last digit, which depends on the CPU."""

  def check_output(self, want, got, optionflags):
    wanted, found = (_NUMBER.findall(text) for text in (want, got))
    numbers = [[float(x) for x in texts] for texts in (wanted, found)]
    texts = [_NUMBER.sub("", text).split() for text in (want, got)]
    return texts[0] == texts[1] and numbers[0] == pytest.approx(
      numbers[1], rel=1e-5
    )


@pytest.mark.parametrize("function", _FUNCTIONS)
def test_the_example_gives_what_it_says(function, capsys):
  # The names of the function's module, as in `python -m doctest`.
  names = vars(sys.modules[function.__module__])
  (example,) = doctest.DocTestFinder(recurse=False).find(
    function, function.__name__, globs=names
  )
  assert example.examples, "its docstring has no example"
  result = doctest.DocTestRunner(_Checker()).run(example)
  assert not result.failed, capsys.readouterr().out
