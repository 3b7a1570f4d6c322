"""Environments: who answers a model that speaks in turns, such as a tool.

An environment is the other side of one conversation. All that its next step
depends on is its `state`, a small JSON value: it is kept with the response, so
that a conversation goes on after a restart as if there had been none. Steps run
in worker processes that know nothing else of each other.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.data.tasks import Example
from jaxrl_llm.rewards.verdict import number

Messages = Sequence[Mapping[str, str]]


class Observation(NamedTuple):
  """What an environment makes of a turn."""

  text: str = ""  # That the model reads next.
  done: bool = False  # The conversation is over.
  rewards: Mapping[str, float] = {}  # Parts of the reward, added over turns.


class Environment(Protocol):
  """One conversation; made anew, and given its state, for every step.

  Attributes:
    state: JSON value, all that `step` may depend on.
  """

  state: Any

  def start(self, example: Example) -> str | Messages | None:
    """Begins, and says what the model reads; None asks the example as it is."""

  def step(self, response: str) -> Observation:
    """Answers a turn of the model: its text, with the token that ended it."""


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
      return Observation("?;", rewards={"misused": 1.0})
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


# Name -> (**environment.settings) -> an environment; '' has none.
ENVIRONMENTS: dict[str, Callable[..., Environment] | None] = {
  "": None,
  "calculator": Calculator,
  "guessing_game": GuessingGame,
}


class Play:
  """Steps of an environment as calls of data to data, for worker processes."""

  def __init__(self, make: Callable[..., Environment], settings: Mapping):
    """Args: an entry of `ENVIRONMENTS`, and its settings."""
    self._make, self._settings = make, dict(settings)

  def start(self, example: Example) -> tuple[str | Messages | None, Any]:
    """What the model reads first, and the state."""
    environment = self._make(**self._settings)
    return environment.start(example), environment.state

  def __call__(self, state: Any, response: str) -> dict[str, Any]:
    """The observation of a turn, and the state after it.

    Raises:
      TypeError: it is no observation.
    """
    environment = self._make(**self._settings)
    environment.state = state
    seen = environment.step(response)
    if not isinstance(seen, Observation) or not (seen.done or seen.text):
      raise TypeError(
        f"step returned {repr(seen)[:60]}; give an Observation that is done or"
        " has a text"
      )
    rewards = {str(k): number(x, k) for k, x in seen.rewards.items()}
    return seen._asdict() | {"rewards": rewards, "state": environment.state}
