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

from jaxrl_llm.data.prompt_source import REPLIES, Template, completion_reply
from jaxrl_llm.data.tasks import Example
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.rewards.pool import CallPool
from jaxrl_llm.rewards.verdict import Grading, number
from jaxrl_llm.rollout.environments import (
  Calculator,
  Environment,
  GuessingGame,
  Messages,
  Observation,
)
from jaxrl_llm.rollout.tools import Tools
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.types import Origin, Status

_CHARS_PER_TOKEN = 32  # Longer texts are cut before they are tokenised.
_CUT = " [cut]"  # Marks a text that was cut, if the vocabulary can spell it.

# Sample id -> the conversation as JSON: state, turns and rewards so far, and
# `failed`, why the environment gave no answer, where that ended it.
Conversations = dict[str, str]


# Name -> (**environment.settings) -> an environment; '' has none.
ENVIRONMENTS: dict[str, Callable[..., Environment] | None] = {
  "": None,
  "calculator": Calculator,
  "guessing_game": GuessingGame,
  "tools": Tools,
}


class Play:
  """Steps of an environment as calls of data to data, for worker processes."""

  def __init__(self, make: Callable[..., Environment], settings: Mapping):
    """Args: an entry of `ENVIRONMENTS`, and its settings."""
    self._make, self._settings = make, dict(settings)

  def template_settings(
    self, template: str, settings: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Those of a template; one for chats is told of tools, for example."""
    if template != "chat":
      return dict(settings)
    own = getattr(self._make(**self._settings), "template_settings", {})
    return {**settings, "kwargs": {**(settings.get("kwargs") or {}), **own}}

  def start(self, example: Example) -> tuple[str | Messages | None, Any]:
    """What the model reads first, and the state.

    Raises:
      InputError: the environment cannot begin with this example.
    """
    what = f"the environment cannot start with {example.id}"
    with as_input_error(what, "correct its start", Exception):
      environment = self._make(**self._settings)
      opening = environment.start(example)
      return opening, json.loads(json.dumps(environment.state))

  def opened(self, template: Template) -> Template:
    """The template, with what the environment says in place of a question."""

    def asked(example: Example) -> list[int]:
      opening, _ = self.start(example)
      if opening is None:
        return template(example)
      name = "question" if isinstance(opening, str) else "messages"
      return template(dataclasses.replace(example, **{name: opening}))

    return asked

  def __call__(self, state: Any, response: str) -> dict[str, Any]:
    """The observation of a turn, and the state after it.

    Raises:
      TypeError, ValueError: it is no observation, or the state no JSON.
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
    # Raises here, where it is the environment's failure, if it is no JSON.
    state = json.loads(json.dumps(environment.state))
    return seen._asdict() | {"rewards": rewards, "state": state}


@dataclasses.dataclass(frozen=True)
class TurnTaking:
  """How conversations are held.

  Attributes:
    start: example -> (what the model reads first, state of its environment).
    ask: {state, response} of some turns -> (what `Play` makes of it, None) or
      (None, why not) of each.
    encode: text -> tokens.
    decode: tokens -> text.
    render: (text of an observation, role) -> tokens, up to where the model's
      next turn begins.
    max_turns: of the model; a response that needs more is overlong.
    max_observation_tokens: maximum number of tokens of an observation's text,
      without what `render` adds; a longer text is cut.
    weights: of the named parts of a turn's reward; 1 where none is given.
  """

  start: Callable[[Example], tuple[Any, Any]]
  ask: CallPool
  encode: Callable[[str], Sequence[int]]
  decode: Callable[[Sequence[int]], str]
  render: Callable[[str, str], Sequence[int]]
  max_turns: int
  max_observation_tokens: int
  weights: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def begin(self, example: Example) -> str:
    """A conversation without a turn."""
    _, state = self.start(example)
    return json.dumps({"state": state, "turns": 0, "rewards": {}})

  def observation(self, text: str, role: str) -> list[int]:
    """Returns the tokens of an observation, its text cut if it is too long.

    Raises:
      InputError: The vocabulary lacks something in the text.
    """
    most, whole = self.max_observation_tokens, text
    text = text[: most * _CHARS_PER_TOKEN].encode(errors="replace").decode()
    tokens = self.encode(text)
    if len(tokens) > most or len(text) < len(whole):
      # A cut inside a character leaves replacement characters.
      text = self.decode(tokens[:most]).rstrip("\ufffd")
      with contextlib.suppress(InputError):
        self.encode(_CUT)
        text += _CUT
    return list(self.render(text, role))


def make_turn_taking(
  play: Play,
  tokenizer: Tokenizer,
  template: str,
  template_settings: Mapping[str, Any],
  *,
  workers: int,
  deadline_s: float,
  **settings: Any,
) -> TurnTaking:
  """How responses to the prompts of a template talk to an environment.

  Args:
    play: the environment.
    tokenizer: of the model.
    template: its name; what the environment says is written as it has it.
    template_settings: its settings.
    workers: processes that answer, as in `CallPool`.
    deadline_s: seconds that an answer may take in one.
    **settings: max_turns, max_observation_tokens and weights.

  Raises:
    InputError: the environment cannot be sent to workers, or the chat template
      does not tell turns apart.
  """
  reply = REPLIES.get(template, completion_reply)
  told = play.template_settings(template, template_settings)
  return TurnTaking(
    start=play.start,
    ask=CallPool(play, workers=workers, deadline_s=deadline_s),
    encode=tokenizer.encode,
    decode=tokenizer.decode,
    render=reply(tokenizer, **told),
    **settings,
  )


class Turns(contextlib.ExitStack):
  """What an engine does between its decode calls for conversations."""

  def __init__(
    self,
    taking: TurnTaking,
    conversations: Conversations,
    answer: Callable[[Request, Sequence[int], Origin], None],
  ):
    """Asks nobody yet.

    Args:
      taking: how they are held.
      conversations: of all requests, written to in place.
      answer: adds tokens to a request that has left its slot, as
        `Scheduler.answer`.
    """
    super().__init__()
    self._taking, self._conversations = taking, conversations
    self._answer = answer
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
      request.asked = False
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
        request.asked = True
    return bool(asked or self._asked)

  def _of(self, request: Request) -> dict[str, Any]:
    return json.loads(self._conversations[str(request.row.sample_id[0])])

  def _turn(self, request: Request) -> str:
    """The text since the last observation."""
    tokens = request.row.tokens[0, request.turn_start : request.length]
    return self._taking.decode(tokens)

  def _add(self, request: Request, answer: Any, failed: str | None) -> None:
    """Ends the response or extends it by the observation.

    A fault of the environment ends it without a reward: the response is left
    out of every loss, as where a verifier fails.
    """
    taking, said = self._taking, self._of(request)
    answer, tokens = answer or Observation(done=True)._asdict(), []
    if not answer["done"]:
      try:
        tokens = taking.observation(answer["text"], answer["role"])
        failed = None if tokens else "the observation has no tokens"
      except InputError as error:
        failed = f"the observation cannot be tokenised: {error}"
    turns, rewards = said["turns"] + 1, said["rewards"]
    for name, value in answer["rewards"].items():
      rewards[name] = rewards.get(name, 0.0) + value
    # On the last token of the turn, which the model wrote.
    reward = Grading(taking.weights).value(answer["rewards"])
    request.row.turn_rewards[0, request.length - 1] = reward
    said |= {"state": answer.get("state", said["state"]), "turns": turns}
    said |= {"failed": failed} if failed else {}
    self._conversations[str(request.row.sample_id[0])] = json.dumps(said)
    room = request.max_tokens - 1 - request.length
    if answer["done"] or failed:
      request.row.status[0] = int(Status.FINISHED)
    elif turns == taking.max_turns or len(tokens) > room:
      request.row.status[0] = int(Status.OVERLONG)
    else:
      self._answer(request, tokens, Origin.FOREIGN)
