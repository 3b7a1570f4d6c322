"""Tools for chat models: Python functions that a model calls with JSON.

The format is that of Hermes and Qwen: a turn has one or more JSON objects with
a name and arguments between `<tool_call>` and `</tool_call>`, and gets a reply
to each. If a call fails, the model gets the error as one line.
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
    name, given = asked["name"], asked.get("arguments", {})
    fn = tools[name]
    inspect.signature(fn).bind(**given)
  except (ValueError, RecursionError) as error:
    return f"error: the tool call is not JSON: {error}"
  except KeyError as error:
    return f"error: no tool {error}; available: {', '.join(tools)}"
  except (TypeError, AttributeError) as error:
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

  def start(self, example: Example) -> None:
    """Uses the question of the data."""

  def step(self, response: str) -> Observation:
    """Returns the results of the calls, one per line."""
    # Drops the text after the last end tag: each start tag there would search
    # for an end tag.
    calls = _CALL.findall("".join(response.rpartition("</tool_call>")[:2]))
    if not calls:
      return Observation(done=True)
    answers = [call(self._tools, text) for text in calls]
    return Observation("\n".join(answers), role="tool")
