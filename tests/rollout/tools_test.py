"""Tools: their descriptions for a chat model, and results of calls."""

import fractions
import json

import pytest

from jaxrl_llm import register
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout import tools
from jaxrl_llm.rollout.environments import Calculator, GuessingGame
from jaxrl_llm.rollout.turns import ENVIRONMENTS


def area(width: float, height: float = 1.0, unit: str = "m") -> str:
  """Computes the area of a rectangle,
  in square units.

  Args:
    width: of the rectangle
    height: of it too
  """
  if width < 0:
    raise ValueError("negative")
  return f"{width * height} {unit}2"


def untyped(x):
  """Does nothing."""


def silent(x: int):
  return x


def failing(lines: bool):
  """Raises an error of several lines, or returns what JSON lacks."""
  if lines:
    raise ValueError("a\nb")
  return {(1, 2): 3}


def half():
  """Returns a number that JSON writes as a text."""
  return [fractions.Fraction(1, 2)]


TOOLS = {"area": area, "python": tools.python, "half": half}


def ask(name, **arguments):
  return json.dumps({"name": name, "arguments": arguments})


class TestSchema:
  def test_of_a_function(self):
    assert tools.schema(area) == {
      "type": "function",
      "function": {
        "name": "area",
        "description": "Computes the area of a rectangle, in square units.",
        "parameters": {
          "type": "object",
          "properties": {
            "width": {"type": "number", "description": "of the rectangle"},
            "height": {"type": "number", "description": "of it too"},
            "unit": {"type": "string"},
          },
          "required": ["width"],
        },
      },
    }

  @pytest.mark.parametrize(
    "fn, said", [(untyped, "'x' of tool 'untyped'"), (silent, "no docstring")]
  )
  def test_what_cannot_be_told_is_refused(self, fn, said):
    with pytest.raises(InputError, match=said):
      tools.schema(fn)


class TestCall:
  @pytest.mark.parametrize(
    "text, answer",
    [
      (ask("area", width=2, height=1.5), "3.0 m2"),
      (ask("python", code="print(6 * 7)"), "42\n"),
      (ask("python", code="1"), "(it printed nothing)"),
      ("{'name': 1}", "error: the tool call is not JSON"),
      ("3", "error: the tool call is invalid"),
      (ask("half"), '["1/2"]'),
      (ask("volume"), "error: no tool 'volume'; available: area, python, half"),
      ("{}", "error: no tool 'name'"),
      (ask("area"), "error: the tool call is invalid: missing"),
      (ask("area", width=1, depth=2), "error: the tool call is invalid: got"),
      (ask("area", width="2"), "error: 'width' of area must be of type number"),
      (ask("area", width=True), "error: 'width' of area must be of type"),
      (ask("area", width=-1), "error: ValueError: negative"),
    ],
  )
  def test_answers_or_says_what_is_wrong(self, text, answer):
    assert tools.call(TOOLS, text).startswith(answer)

  @pytest.mark.parametrize(
    "text, answer",
    [
      ("[" * 100_000, "error: the tool call is not JSON: maximum recursion"),
      ('{"name": ' + "1" * 5000 + "}", "error: the tool call is not JSON: Exc"),
      (ask("failing", lines=True), "error: ValueError: a b"),
      (ask("failing", lines=False), "error: TypeError: keys must be"),
    ],
  )
  def test_every_error_is_a_line_for_the_model(self, text, answer):
    said = tools.call({"failing": failing}, text)
    assert said.startswith(answer) and "\n" not in said


def test_a_program_without_an_end_is_told_to_the_model(monkeypatch):
  monkeypatch.setattr(tools, "_PYTHON_S", 0.01)
  said = tools.call(TOOLS, ask("python", code="while True: pass"))
  assert said.startswith("error: TimeoutError: the program ran for more")


class TestTools:
  def test_answers_every_call_of_a_turn(self):
    own = tools.Tools()
    calls = [ask("python", code=f"print({n})") for n in (1, 2)]
    turn = "Let me see. " + "".join(
      f"<tool_call>\n{call}\n</tool_call>" for call in calls
    )
    seen = own.step(turn)
    assert seen.text == "1\n\n2\n" and seen.role == "tool" and not seen.done
    assert own.step("It is 2.").done
    (told,) = own.template_settings["tools"]
    assert told["function"]["parameters"]["required"] == ["code"]

  def test_starts_without_an_end_are_no_calls(self):
    assert tools.Tools().step("<tool_call>" * 50_000).done

  def test_of_ones_own(self):
    register.tools("areas", area)
    own = ENVIRONMENTS.pop("areas")()
    calls = [ask("area", width=3), ask("python", code="1")]
    seen = own.step("".join(f"<tool_call>{x}</tool_call>" for x in calls))
    assert seen.text == "3.0 m2\nerror: no tool 'python'; available: area"
    assert own.template_settings["tools"] == [tools.schema(area)]
    with pytest.raises(InputError, match="no docstring"):
      tools.Tools([silent])


class TestCalculator:
  @pytest.mark.parametrize(
    "turn, text",
    [("3+4;7-12=", "-5;"), ("12*12=", "144;"), ("-3+1=", "-2;"), ("a=", "?;")],
  )
  def test_works_out_what_is_open(self, turn, text):
    seen = Calculator().step(turn)
    assert seen.text == text and not seen.done

  def test_a_turn_without_a_sum_is_the_last(self):
    assert Calculator().step("#17.").done


class TestGuessingGame:
  def test_by_hand(self):
    game = GuessingGame()
    game.state = {"number": 40, "left": 5}
    said = [game.step(turn).text for turn in ("50", "is it 30?", "hm")]
    assert said == ["lower", "higher", "Say a number."]
    assert json.loads(json.dumps(game.state)) == {"number": 40, "left": 2}
    found = game.step("30 or rather 40")
    assert found.done and found.rewards == {"found": 1.0}

  def test_ends_when_the_guesses_are_used_up(self):
    game = GuessingGame()
    game.state = {"number": 40, "left": 1}
    lost = game.step("41")
    assert lost.done and lost.rewards == {"found": 0.0}
