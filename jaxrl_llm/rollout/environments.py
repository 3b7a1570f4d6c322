"""Environments, such as tools, which reply to the turns of a model.

An environment is the other side of one conversation. Its next step depends only
on its `state`, a small JSON value that is stored with the response, so that
conversations continue unchanged after a restart. Steps run in worker processes,
which share nothing else.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.data.tasks import Example

Messages = Sequence[Mapping[str, str]]


class Observation(NamedTuple):
  """The reply of an environment to a turn of the model."""

  # The next input of the model; several texts are a message each.
  text: str | Sequence[str] = ""
  done: bool = False  # The conversation is over.
  rewards: Mapping[str, float] = {}  # Parts of the reward, summed over turns.
  role: str = "user"  # Role of the message for a chat model.


class Environment(Protocol):
  """One conversation; created for every step, which restores its state.

  May also have `template_settings`, variables of the chat template, and
  `check_template(render, reply)`, which raises an InputError if a chat template
  does not fit; see `Tools`.

  Attributes:
    state: JSON value; `step` may depend on nothing else.
  """

  state: Any

  def start(self, example: Example) -> str | Messages | None:
    """Starts and returns the opening; None for the example's question."""

  def step(self, response: str) -> Observation:
    """Replies to a turn of the model.

    `response` is the text of the turn, including the token that ended it.

    Return errors that the model should read as text. If this raises, the
    response ends and is left out of every loss.
    """


class Calculator:
  """Computes open sums: the reply to `7+5=` is `12;`."""

  state = None
  _OPEN = re.compile(r"(-?\d{1,18})([-+*])(-?\d{1,18})=\Z")
  _OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

  def start(self, example: Example) -> None:
    """Uses the question of the data."""

  def step(self, response: str) -> Observation:
    """Returns the value of an open sum; a response without one ends."""
    if not response.endswith("="):
      return Observation(done=True)
    found = self._OPEN.search(response)
    if not found:
      return Observation("?;", rewards={"misused": -1.0})
    left, sign, right = found.groups()
    return Observation(f"{self._OPERATORS[sign](int(left), int(right))};")


class GuessingGame:
  """Guess a number; the environment replies 'higher' or 'lower'.

  The number is the example's answer. The reward `found` is 1 for finding it.
  """

  state = None
  _TURNS = 8

  def start(self, example: Example) -> str:
    """Returns the range, and stores the number."""
    self.state = {"number": int(example.answer), "left": self._TURNS}
    return "Guess my number between 0 and 99."

  def step(self, response: str) -> Observation:
    """Returns 'higher' or 'lower', or ends the game."""
    guesses = re.findall(r"-?\d{1,9}", response)
    self.state["left"] -= 1
    if guesses and int(guesses[-1]) == self.state["number"]:
      return Observation(done=True, rewards={"found": 1.0})
    if not self.state["left"]:
      return Observation(done=True, rewards={"found": 0.0})
    if not guesses:
      return Observation("Say a number.")
    below = int(guesses[-1]) < self.state["number"]
    return Observation("higher" if below else "lower")
