"""Tools: their descriptions for a chat model, and results of calls."""

import fractions
import json

import pytest
from helpers import chat_model

from jaxrl_llm import register
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout import tools
from jaxrl_llm.rollout.environments import Calculator, GuessingGame
from jaxrl_llm.rollout.turns import (
  ENVIRONMENTS,
  EnvironmentCalls,
  make_conversation_config,
)


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
      ("3", "error: the tool call is invalid: give the arguments in an obj"),
      ('{"name": "half", "arguments": null}', '["1/2"]'),
      (
        '{"name": "half", "arguments": [1]}',
        "error: the tool call is invalid:",
      ),
      (
        '{"name": "area", "arguments": null}',
        "error: the tool call is invalid",
      ),
      ('{"name": ["half"]}', "error: no tool"),
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
    assert seen.text == ["1\n", "2\n"] and seen.role == "tool" and not seen.done
    assert own.step("It is 2.").done
    (told,) = own.template_settings["tools"]
    assert told["function"]["parameters"]["required"] == ["code"]

  @pytest.mark.parametrize(
    "turn, answers",
    [
      ("<think>{1}</think>{2}", "2.0 m2"),
      ("I think {1}</think>{2}", "2.0 m2"),
      ("{1}<think>{2}", "1.0 m2"),
      ("{1}<think>{2}</think>{3}", ["1.0 m2", "3.0 m2"]),
      ("<think>{1}</think> It is 3.", None),
      ("<think>{1}", None),
      ("<think>" * 50_000 + "{1}", None),
    ],
  )
  def test_nothing_in_reasoning_is_a_call(self, turn, answers):
    for n in (1, 2, 3):
      call = f"<tool_call>{ask('area', width=n)}</tool_call>"
      turn = turn.replace(f"{{{n}}}", call)
    seen = tools.Tools([area]).step(turn)
    assert seen.done == (answers is None)
    assert seen.text == (answers or "")

  def test_starts_without_an_end_are_no_calls(self):
    assert tools.Tools().step("<tool_call>" * 50_000).done

  def test_of_ones_own(self):
    register.tools("areas", area)
    own = ENVIRONMENTS.pop("areas")()
    calls = [ask("area", width=3), ask("python", code="1")]
    seen = own.step("".join(f"<tool_call>{x}</tool_call>" for x in calls))
    assert seen.text == ["3.0 m2", "error: no tool 'python'; available: area"]
    assert own.template_settings["tools"] == [tools.schema(area)]
    with pytest.raises(InputError, match="no docstring"):
      tools.Tools([silent])


QWEN = """{% for t in tools or [] %}{{ t | tojson }}{% endfor %}
{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}
{% set f = c.function %}
<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}
</tool_call>{% endfor %}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
CALL = QWEN[QWEN.index("<tool_call>") : QWEN.index("{% endfor %}{{ eos")]


class TestTemplates:
  """The model's format of calls and replies is checked at the start."""

  def make(self, folder, template, name="tools"):
    path = folder / "chat"
    if not path.exists():
      chat_model.write(path)
    told = json.dumps({"chat_template": template})
    (path / "tokenizer_config.json").write_text(told)
    return make_conversation_config(
      EnvironmentCalls(ENVIRONMENTS[name], {}),
      Tokenizer(path),
      "chat",
      {},
      workers=0,
      deadline_s=1.0,
      max_turns=9,
      max_observation_tokens=20,
    )

  @pytest.mark.parametrize(
    "template, why",
    [
      (QWEN, None),
      # The model must find the format itself.
      (QWEN.replace(CALL, ""), None),
      (
        QWEN.replace("<tool_call>", "[CALLS]"),
        r"writes calls as .*\[CALLS\].* tools are called by <tool_call>",
      ),
      (QWEN.replace('"arguments"', '"parameters"'), "writes calls as"),
      (
        QWEN.replace(CALL, "<tool_call><function={{ f.name }}>"),
        "writes calls as",
      ),
      (QWEN.replace("t | tojson", "''"), "shows no tools"),
      (
        QWEN.replace("{{ m.role }}", "{% if m.role != 'tool' %}").replace(
          "{{ eos_token }}", "{{ eos_token }}{% endif %}"
        ),
        "leaves out the replies",
      ),
      (
        QWEN.replace(
          "{{ m.role }}",
          "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}",
        ),
        "the chat template failed .no",
      ),
    ],
  )
  def test_of_other_kinds_are_refused(self, tmp_path, template, why):
    if why is None:
      self.make(tmp_path, template)
    else:
      with pytest.raises(InputError, match=why) as caught:
        self.make(tmp_path, template)
      assert str(tmp_path / "chat") in str(caught.value)
    # An environment without tools needs none of it.
    self.make(tmp_path, template, "guessing_game")

  def test_several_replies_share_the_room(self, tmp_path):
    config = self.make(tmp_path, QWEN)
    read = lambda texts: config.tokenizer.decode(
      config.observation(texts, "tool"), skip_special=False
    )
    end = config.tokenizer.decode([config.tokenizer.eos_id], skip_special=False)
    said = [f"tool: {text}{end}" for text in ("1" * 15, "2" * 5 + " [cut]", "")]
    said[2] = f"tool:  [cut]{end}"
    shown = read(["1" * 15, "2" * 9, "3"])
    assert shown == "\n" + "\n".join(said) + "\nassistant: "


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
