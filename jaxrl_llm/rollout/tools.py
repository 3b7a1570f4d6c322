"""Tools for chat models: Python functions that a model calls with JSON.

The format is that of Hermes and Qwen: a turn has one or more JSON objects with
a name and arguments between `<tool_call>` and `</tool_call>`, and gets a
message in reply to each. Nothing between `<think>` and `</think>` is a call. If
a call fails, the model gets the error as one line.
"""

import functools
import inspect
import json
import os
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.data.tasks import Example
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.environments import Observation
from jaxrl_llm.system import contained
from jaxrl_llm.system.workers import Worker

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_PYTHON_S = 5.0  # Time limit of a program, in seconds.
_GRACE_S = 5.0  # Time to end an overdue program.
_TYPES = {
  str: "string",
  int: "integer",
  float: "number",
  bool: "boolean",
  list: "array",
  dict: "object",
}


def schema(fn: Callable[..., Any]) -> dict[str, Any]:
  """Returns the JSON schema of a function for a chat template.

  Args:
    fn: function with typed arguments and a docstring that describes it and, in
      lines `name: text`, its arguments.

  Raises:
    InputError: An argument has no JSON type, or there is no docstring.
  """
  text = inspect.getdoc(fn)
  if not text:
    raise InputError(
      f"tool {fn.__name__!r} has no docstring; describe its use in one"
    )
  described = dict(re.findall(r"^\s*(\w+): (.+)$", text, re.MULTILINE))
  properties, required = {}, []
  for name, parameter in inspect.signature(fn).parameters.items():
    kind = _TYPES.get(_type(fn, name))
    if kind is None:
      raise InputError(
        f"argument {name!r} of tool {fn.__name__!r} needs one of the types"
        f" {', '.join(t.__name__ for t in _TYPES)}"
      )
    about = {"description": described[name]} if name in described else {}
    properties[name] = {"type": kind} | about
    if parameter.default is parameter.empty:
      required.append(name)
  return {
    "type": "function",
    "function": {
      "name": fn.__name__,
      "description": " ".join(text.split("\n\n")[0].split()),
      "parameters": {
        "type": "object",
        "properties": properties,
        "required": required,
      },
    },
  }


def _type(fn: Callable[..., Any], name: str) -> type | None:
  kind = typing.get_type_hints(fn).get(name)
  return typing.get_origin(kind) or kind


def call(tools: dict[str, Callable[..., Any]], text: str) -> str:
  """Runs the call in a text and returns its result or the error."""
  try:
    asked = json.loads(text)
    given = asked.get("arguments") if isinstance(asked, dict) else asked
    given = {} if given is None else given
    if not isinstance(given, dict):
      raise TypeError("give the arguments in an object")
    name = str(asked["name"])
    fn = tools[name]
    inspect.signature(fn).bind(**given)
  except (ValueError, RecursionError) as error:
    return f"error: the tool call is not JSON: {error}"
  except KeyError as error:
    return f"error: no tool {error}; available: {', '.join(tools)}"
  except TypeError as error:
    return f"error: the tool call is invalid: {error}"
  for key, value in given.items():
    kind = _type(fn, key)
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
      return f"error: {key!r} of {name} must be of type {_TYPES[kind]}"
  try:
    result = fn(**given)
    if not isinstance(result, str):
      result = json.dumps(result, default=str)
  except Exception as error:  # User code may raise and return anything.
    return f"error: {type(error).__name__}: {' '.join(str(error).split())}"
  return result


def python(code: str) -> str:
  """Runs a Python program and returns what it prints.

  Programs that exceed a limit (5 seconds, 4 GiB, 512 processes or 1 MiB of
  output) are stopped, with all processes that they have started. Their current
  folder is deleted. Unsafe: programs have all permissions of the training
  process. Train in a container.

  Args:
    code: the program, which prints its result.
  """
  job = json.dumps([code, _PYTHON_S])
  printed, error = _programs(os.getpid()).ask(job, _PYTHON_S + _GRACE_S)
  if error == "timeout":
    raise TimeoutError(f"the program ran for more than {_PYTHON_S} s")
  if error:
    raise RuntimeError(
      "it has started too many processes, or killed its parent"
    )
  return printed or "(it printed nothing)"


@functools.cache
def _programs(process: int) -> Worker:
  """Returns the worker of this process, not one that a fork has inherited."""
  del process
  return Worker(contained.serve_programs)


class Tools:
  """Runs the tool calls of a turn; a turn without any is the last.

  Attributes:
    template_settings: variables of the model's chat template.
  """

  state = None

  def __init__(self, functions: Sequence[Callable[..., Any]] = (python,)):
    """Makes tools of functions; see `schema`.

    Raises:
      InputError: A function has no JSON schema.
    """
    self._tools = {fn.__name__: fn for fn in functions}
    self.template_settings = {"tools": list(map(schema, functions))}

  def check_template(self, render: Callable[[Sequence[dict]], str]) -> None:
    """Checks that a chat template shows tools, calls and replies as used here.

    Args:
      render: messages -> text of the conversation with these tools.

    Raises:
      InputError: It does not, or it fails.
    """
    asked, name = {"role": "user", "content": "?"}, next(iter(self._tools))
    shown = render([asked])
    if not all(name in shown for name in self._tools):
      raise InputError("the chat template shows no tools; use another model")
    made = {"name": name, "arguments": {"code": "42"}}
    own = {"id": "callcall1", "type": "function", "function": made}
    answer = {"role": "assistant", "content": ""}
    text = render([asked, answer | {"tool_calls": [own]}])
    results = [call({name: _repeat}, x) for x in _calls(text)]
    # A template may leave the format to the model.
    if "42" not in results and text != render([asked, answer]):
      raise InputError(
        f"the chat template writes calls as {text.strip()[-99:]!r}, but tools"
        ' are called by <tool_call>{"name": NAME, "arguments": OBJECT}'
        "</tool_call>; use another model, or an environment of your own"
      )
    replies = [{"role": "tool", "content": x} for x in ("31415", "27182")]
    text = render([asked, answer | {"content": "!"}, *replies])
    if not all(x["content"] in text for x in replies):
      raise InputError(
        "the chat template leaves out the replies of tools; use another model"
      )

  def start(self, example: Example) -> None:
    """Uses the question of the data."""

  def step(self, response: str) -> Observation:
    """Returns the results of the calls, a message each."""
    calls = _calls(_outside(response))
    if not calls:
      return Observation(done=True)
    answers = [call(self._tools, text) for text in calls]
    return Observation(answers if answers[1:] else answers[0], role="tool")


def _outside(response: str) -> str:
  """Returns a text without reasoning, which the prompt may have begun."""
  return _THOUGHT.sub("", response).rpartition("</think>")[2]


def _calls(text: str) -> list[str]:
  # Drops the text after the last end tag: each start tag there would search
  # for an end tag.
  return _CALL.findall("".join(text.rpartition("</tool_call>")[:2]))


def _repeat(code: str) -> str:
  return code
