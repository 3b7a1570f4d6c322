"""Conversations in the making: turns of the model and of its environment.

A response that ended a turn leaves its slot. What the environment says is added
to it after the decode call that follows, whichever answer came first: the same
responses are decoded together in every run, and a tool has the time of a decode
call. Its tokens carry no loss, and cost a prefill of themselves alone.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.tasks import Example
from jaxrl_llm.errors import InputError
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.types import Origin, Status

# {state, response} of turns -> (what `Play` makes of it, None), or (None, why).
Ask = Callable[[Sequence[Mapping[str, Any]]], Sequence[tuple[Any, str | None]]]

_CHARS_PER_TOKEN = 32  # Longer texts are cut before they are tokenised.

# Sample id -> the conversation as JSON: state, turns and rewards so far.
Conversations = dict[str, str]


@dataclasses.dataclass(frozen=True)
class TurnTaking:
  """How conversations are held.

  Attributes:
    start: example -> (what the model reads first, state of its environment).
    ask: asks the environments of some conversations.
    decode: tokens -> text.
    render: the text of an observation -> tokens, up to where the model's next
      turn begins.
    max_turns: of the model; a response that needs more is overlong.
    max_observation_tokens: what is longer is cut.
  """

  start: Callable[[Example], tuple[Any, Any]]
  ask: Ask
  decode: Callable[[Sequence[int]], str]
  render: Callable[[str], Sequence[int]]
  max_turns: int
  max_observation_tokens: int

  def begin(self, example: Example) -> str:
    """A conversation without a turn."""
    _, state = self.start(example)
    return json.dumps({"state": state, "turns": 0, "rewards": {}})


class Turns(contextlib.ExitStack):
  """What an engine does between its decode calls for conversations."""

  def __init__(
    self,
    taking: TurnTaking,
    conversations: Conversations,
    extend: Callable[[Request, Sequence[int], Origin], None],
  ):
    """Asks nobody yet.

    Args:
      taking: how they are held.
      conversations: of all requests, written to in place.
      extend: adds tokens to a request that has left its slot.
    """
    super().__init__()
    self._taking, self._conversations = taking, conversations
    self._extend = extend
    self._asked: list[Request] = []
    self._answers: concurrent.futures.Future | None = None
    self._thread = self.enter_context(concurrent.futures.ThreadPoolExecutor(1))

  def __call__(self, left: Sequence[Request]) -> bool:
    """Adds what was asked for before, and asks for those that left.

    Args:
      left: requests that have just left their slots.

    Returns:
      Whether something was added or asked for.
    """
    asked, answers = self._asked, self._answers
    for request, answer in zip(asked, answers.result() if asked else ()):
      self._add(request, *answer)
    self._asked = [r for r in left if r.row.status[0] == Status.FINISHED]
    if self._asked:
      jobs = [
        {"state": self._of(request)["state"], "response": self._turn(request)}
        for request in self._asked
      ]
      self._answers = self._thread.submit(self._taking.ask, jobs)
      for request in self._asked:
        request.row.status[0] = int(Status.TRUNCATED)  # It may go on.
    return bool(asked or self._asked)

  def _of(self, request: Request) -> dict[str, Any]:
    return json.loads(self._conversations[str(request.row.sample_id[0])])

  def _turn(self, request: Request) -> str:
    """The text since the last observation."""
    row, length = request.row, request.length
    others = np.flatnonzero(row.origin[0, :length] != Origin.POLICY)
    begun = others[-1] + 1 if others.size else 0
    return self._taking.decode(row.tokens[0, begun:length])

  def _add(self, request: Request, answer: Any, failed: str | None) -> None:
    """Ends the response or extends it by the observation."""
    taking, said = self._taking, self._of(request)
    if failed:  # The model may try something else.
      answer = {"text": failed, "done": False, "rewards": {"failed": 1.0}}
    tokens, readable = self._tokens(answer["text"])
    if not (answer["done"] or readable):
      answer |= {"done": True, "rewards": {"failed": 1.0}}
    turns, rewards = said["turns"] + 1, said["rewards"]
    for name, value in answer["rewards"].items():
      rewards[name] = rewards.get(name, 0.0) + value
    state = answer.get("state", said["state"])
    self._conversations[str(request.row.sample_id[0])] = json.dumps(
      {"state": state, "turns": turns, "rewards": rewards}
    )
    room = request.max_tokens - 1 - request.length
    if answer["done"]:
      request.row.status[0] = int(Status.FINISHED)
    elif turns == taking.max_turns or len(tokens) > room:
      request.row.status[0] = int(Status.OVERLONG)
    else:
      self._extend(request, tokens, Origin.FOREIGN)

  def _tokens(self, text: str) -> tuple[list[int], bool]:
    """An observation as the model reads it, and whether it can."""
    most = self._taking.max_observation_tokens
    text = text[: most * _CHARS_PER_TOKEN].encode(errors="replace").decode()
    try:
      tokens = list(self._taking.render(text))[:most]
    except InputError:  # Its vocabulary has no word for something in it.
      return [], False
    return tokens, bool(tokens)
