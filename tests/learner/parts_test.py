"""Inputs are resolved by name, and only those that are read are computed."""

import functools

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import parts
from jaxrl_llm.learner.parts import part, then


def scaled(x, *, factor, offset=1.0):
  return factor * x + offset


class TestPart:
  @pytest.mark.parametrize(
    ("settings", "inputs", "reads", "result"),
    [
      ({"factor": 3.0, "of_another_part": 9.0}, {}, ("x",), 7.0),
      ({"factor": 3.0, "offset": 0.0}, {"x": "y"}, ("y",), 15.0),
      # An input instead of a setting.
      ({"factor": 3.0, "offset": 0.0}, {"offset": "y"}, ("x", "y"), 11.0),
    ],
  )
  def test_reads_its_arguments_or_inputs_of_other_names(
    self, settings, inputs, reads, result
  ):
    made = part(scaled, settings, **inputs)
    assert made.reads == reads
    assert made({"x": 2.0, "y": 5.0}) == result

  def test_then_reads_on(self):
    first = part(scaled, {"factor": 3.0})
    made = then(first, part(lambda result, y, z: (result - y) * z))
    assert made.reads == ("x", "y", "z")
    assert made({"x": 2.0, "y": 5.0, "z": 10.0}) == 20.0


class TestEvaluate:
  def make(self):
    """Makes parts: c needs a and b, b needs a and leaf x, d another leaf."""
    calls = []

    def noted(name, fn):
      return functools.wraps(fn)(
        lambda **arrays: calls.append(name) or fn(**arrays)
      )

    made = {
      "a": part(noted("a", lambda x: 2 * x)),
      "b": part(noted("b", lambda a, x: a + x)),
      "c": part(noted("c", lambda a, b: a * b)),
      "d": part(noted("d", lambda y: y)),
    }
    return made, calls

  def test_computes_what_is_read_once(self):
    made, calls = self.make()
    assert parts.leaves_of(["c"], made) == {"x"}
    got = parts.evaluate(["c", "x"], made, {"x": np.float32(3.0)})
    assert got == {"c": 54.0, "x": 3.0}
    assert calls == ["a", "b", "c"]

  def test_an_input_that_nobody_gives(self):
    made, _ = self.make()
    assert parts.leaves_of(["c", "d"], made) == {"x", "y"}
    with pytest.raises(KeyError, match="y"):
      parts.evaluate(["c", "d"], made, {"x": np.float32(3.0)})

  def test_an_input_that_needs_itself(self):
    made = {
      "a": part(lambda x, b: x + b),
      "b": part(lambda y, c: y + c),
      "c": part(lambda b: b),
    }
    with pytest.raises(InputError, match="^b needs c needs b: "):
      parts.leaves_of(["a"], made)

  def test_is_a_constant_of_a_loss(self):
    made, _ = self.make()
    loss = lambda x: x * parts.evaluate(["b"], made, {"x": x})["b"]
    assert jax.grad(loss)(2.0) == 6.0
