"""Environments: who answers a model that speaks in turns, such as a tool.

An environment is the other side of one conversation. All that its next step
depends on is its `state`, a small JSON value: it is kept with the response, so
that a conversation goes on after a restart as if there had been none. Steps run
in worker processes that know nothing else of each other.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.data.tasks import Example

Messages = Sequence[Mapping[str, str]]


class Observation(NamedTuple):
  """The reply of an environment to a turn of the model."""

  text: str = ""  # Read by the model next.
  done: bool = False  # The conversation is over.
  rewards: Mapping[str, float] = {}  # Parts of the reward, added over turns.
  role: str = "user"  # Role of the message for a chat model.


class Environment(Protocol):
  """One conversation; made anew, and given its state, for every step.

  Attributes:
    state: JSON value, all that `step` may depend on.
  """

  state: Any

  def start(self, example: Example) -> str | Messages | None:
    """Begins, and says what the model reads; None asks the example as it is."""

  def step(self, response: str) -> Observation:
    """Answers a turn of the model: its text, with the token that ended it.

    An error that the model should read is text of the observation. Where this
    raises, the response ends and is left out of every loss.
    """


class Calculator:
  """Works out what the model leaves open: `7+5=` is answered by `12;`."""

  state = None
  _OPEN = re.compile(r"(-?\d{1,18})([-+*])(-?\d{1,18})=\Z")
  _OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

  def start(self, example: Example) -> None:
    """The question is that of the data."""

  def step(self, response: str) -> Observation:
    """The value of the sum at its end; a turn without one is the last."""
    if not response.endswith("="):
      return Observation(done=True)
    found = self._OPEN.search(response)
    if not found:
      return Observation("?;", rewards={"misused": -1.0})
    left, sign, right = found.groups()
    return Observation(f"{self._OPERATORS[sign](int(left), int(right))};")


class GuessingGame:
  """A number is to be guessed; the environment says on which side it lies.

  The number is the example's answer. `found` is the reward of finding it.
  """

  _TURNS = 8

  def __init__(self):
    self.state = None

  def start(self, example: Example) -> str:
    """Tells the range, and keeps the number."""
    self.state = {"number": int(example.answer), "left": self._TURNS}
    return "Guess my number between 0 and 99."

  def step(self, response: str) -> Observation:
    """'higher', 'lower', or the end."""
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
