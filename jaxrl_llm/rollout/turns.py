"""Multi-turn responses: turns of the model and replies of an environment.

A response that has ended a turn leaves its slot. The reply is appended only
after the next decode call, even if it arrives earlier, so that batch
composition (and the run) does not depend on tool latency. Replies carry no
loss, and only their own tokens are prefilled.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.data import prompt_source
from jaxrl_llm.data.tasks import Example
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError, as_input_error, located
from jaxrl_llm.rewards.pool import CallPool
from jaxrl_llm.rewards.verdict import Grading, number
from jaxrl_llm.rollout import environments
from jaxrl_llm.rollout.environments import Environment, Observation
from jaxrl_llm.rollout.tools import Tools
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.system import processes
from jaxrl_llm.types import Origin, Status

_CHARS_PER_TOKEN = 32  # Longer texts are cut before they are tokenised.
_CUT = " [cut]"  # Appended to a cut text, if the vocabulary has it.

# Sample id -> conversation as JSON: state, turns and rewards so far, and
# `failed`, the environment's error, if that ended the conversation.
Conversations = dict[str, str]


# Name -> (**environment.settings) -> environment; '' is none.
ENVIRONMENTS: dict[str, Callable[..., Environment] | None] = {
  "": None,
  "calculator": environments.Calculator,
  "guessing_game": environments.GuessingGame,
  "tools": Tools,
}


class EnvironmentCalls:
  """Steps of an environment as calls on JSON data, for worker processes."""

  def __init__(self, make: Callable[..., Environment], settings: Mapping):
    """Takes an entry of `ENVIRONMENTS` and its settings."""
    self._make, self._settings = make, dict(settings)

  def template_settings(
    self, template: str, settings: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Returns template settings, with the environment's own (such as tools)."""
    if template != "chat":
      return dict(settings)
    own = getattr(self._make(**self._settings), "template_settings", {})
    return {**settings, "kwargs": {**(settings.get("kwargs") or {}), **own}}

  def check_template(self, render: Callable[..., str]) -> None:
    """Checks a chat template; see `Tools.check_template`."""
    environment = self._make(**self._settings)
    getattr(environment, "check_template", lambda _: None)(render)

  def start(
    self, example: Example
  ) -> tuple[str | environments.Messages | None, Any]:
    """Returns the opening for the model, and the environment's state.

    Raises:
      InputError: The environment cannot start with this example.
    """
    what = f"the environment cannot start with {example.id}"
    with as_input_error(what, "correct its start", Exception):
      environment = self._make(**self._settings)
      opening = environment.start(example)
      return opening, json.loads(json.dumps(environment.state))

  def opened(self, template: prompt_source.Template) -> prompt_source.Template:
    """Returns the template with the environment's opening as the question."""

    def render(example: Example) -> list[int]:
      opening, _ = self.start(example)
      if opening is None:
        return template(example)
      name = "question" if isinstance(opening, str) else "messages"
      return template(dataclasses.replace(example, **{name: opening}))

    return render

  def __call__(self, state: Any, response: str) -> dict[str, Any]:
    """Returns the observation of a turn, and the state after it.

    Raises:
      TypeError, ValueError: The result is not an observation, or the state is
        not JSON.
    """
    environment = self._make(**self._settings)
    environment.state = state
    seen = environment.step(response)
    fits = isinstance(seen, Observation) and isinstance(seen.role, str)
    fits = fits and isinstance(seen.text, str | list | tuple)
    fits = fits and all(isinstance(text, str) for text in seen.text)
    fits = fits and (seen.done or seen.text)
    if not fits or not isinstance(seen.rewards, Mapping):
      raise TypeError(
        f"step returned {repr(seen)[:80]}; return an Observation that is done"
        " or has a text or several, whose role is a text, and whose rewards are"
        " numbers by name"
      )
    rewards = {str(k): number(x, k) for k, x in seen.rewards.items()}
    # A state that is not JSON raises here, as a failure of the environment.
    state = json.loads(json.dumps(environment.state))
    return seen._asdict() | {"rewards": rewards, "state": state}


@dataclasses.dataclass(frozen=True)
class ConversationConfig:
  """Configuration of multi-turn responses.

  Attributes:
    start: example -> (opening for the model, state of the environment).
    call: {state, response} of each turn -> (result of `EnvironmentCalls`, None)
      or (None, error).
    tokenizer: tokenizer of the model.
    render: (texts of an observation, role) -> tokens, up to where the model's
      next turn begins.
    max_turns: maximum number of model turns; responses that need more are
      overlong.
    max_observation_tokens: maximum number of tokens of an observation's texts,
      not counting those that `render` adds; longer ones are cut.
    weights: weights of named parts of a turn's reward; 1 by default.
  """

  start: Callable[[Example], tuple[Any, Any]]
  call: CallPool
  tokenizer: Tokenizer
  render: Callable[[Sequence[str], str], Sequence[int]]
  max_turns: int
  max_observation_tokens: int
  weights: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def begin(self, example: Example) -> str:
    """Returns a conversation without turns."""
    _, state = self.start(example)
    return json.dumps({"state": state, "turns": 0, "rewards": {}})

  def observation(self, text: str | Sequence[str], role: str) -> list[int]:
    """Returns the tokens of an observation, cut if it is too long.

    Raises:
      InputError: The vocabulary lacks something in the text.
    """
    left, texts = self.max_observation_tokens, []
    for whole in prompt_source.several(text):
      text = whole[: left * _CHARS_PER_TOKEN].encode(errors="replace").decode()
      tokens = self.tokenizer.continued(text)
      if len(tokens) > left or len(text) < len(whole):
        # A cut inside a character leaves replacement characters.
        text = self.tokenizer.decode(tokens[:left]).rstrip("\ufffd")
        with contextlib.suppress(InputError):
          self.tokenizer.encode(_CUT)
          text += _CUT
      left -= min(len(tokens), left)
      texts.append(text)
    return list(self.render(texts, role))


def make_conversation_config(
  play: EnvironmentCalls,
  tokenizer: Tokenizer,
  template: str,
  template_settings: Mapping[str, Any],
  *,
  workers: int,
  deadline_s: float,
  **settings: Any,
) -> ConversationConfig:
  """Makes the configuration of conversations with an environment.

  Args:
    play: steps of the environment.
    tokenizer: tokenizer of the model.
    template: name of the template, which also formats observations.
    template_settings: settings of the template.
    workers: processes that run environments, as in `CallPool`.
    deadline_s: time limit of a reply in a worker, in seconds.
    **settings: max_turns, max_observation_tokens and weights.

  Raises:
    InputError: The environment cannot be pickled for the workers, or the chat
      template has no stop token between turns or does not fit the environment.
  """
  own = play.template_settings(template, template_settings)
  make = prompt_source.REPLIES.get(template, prompt_source.completion_reply)
  reply = make(tokenizer, **own)
  if template == "chat":
    chat = functools.partial(tokenizer.apply_chat, kwargs=own.get("kwargs"))
    with located(tokenizer.path):
      play.check_template(lambda x: tokenizer.decode(chat(x), False))
  return ConversationConfig(
    start=play.start,
    call=CallPool(play, workers=workers, deadline_s=deadline_s),
    tokenizer=tokenizer,
    render=reply,
    **settings,
  )


class TurnHook(contextlib.ExitStack):
  """Extends conversations between the decode calls of an engine."""

  def __init__(
    self,
    config: ConversationConfig,
    conversations: Conversations,
    answer: Callable[[Request, Sequence[int], Origin], None],
  ):
    """Starts the thread that calls environments.

    Args:
      config: configuration of the conversations.
      conversations: conversations of all requests, updated in place.
      answer: `Scheduler.answer`, which extends a request that left its slot.
    """
    super().__init__()
    self._config, self._conversations = config, conversations
    self._answer = answer
    self._pending: list[Request] = []
    self._answers: concurrent.futures.Future | None = None
    self._thread = self.enter_context(
      concurrent.futures.ThreadPoolExecutor(1, "environment")
    )

  def __call__(self, left: Sequence[Request]) -> bool:
    """Appends the replies requested earlier, and requests those to new turns.

    Args:
      left: requests that have just left their slots.

    Returns:
      Whether a reply was appended or requested.
    """
    pending, answers = self._pending, self._answers
    for request, answer in zip(pending, answers.result() if pending else ()):
      request.awaiting_environment = False
      self._add(request, *answer)
    self._pending = [r for r in left if r.row.status[0] == Status.FINISHED]
    if self._pending:
      jobs = [
        {"state": self._of(request)["state"], "response": self._turn(request)}
        for request in self._pending
      ]
      self._answers = self._thread.submit(
        processes.in_shares, self._config.call, jobs
      )
      for request in self._pending:
        request.row.status[0] = int(Status.TRUNCATED)  # It may continue.
        request.awaiting_environment = True
    return bool(pending or self._pending)

  def _of(self, request: Request) -> dict[str, Any]:
    return json.loads(self._conversations[str(request.row.sample_id[0])])

  def _turn(self, request: Request) -> str:
    """Returns the text since the last observation, with a given opening."""
    start = request.turn_start
    start *= request.row.mask[0, :start].any()
    tokens = request.row.tokens[0, start : request.length]
    return self._config.tokenizer.decode(tokens)

  def _add(self, request: Request, answer: Any, failed: str | None) -> None:
    """Ends the response or appends the observation to it.

    An error of the environment ends the response without a reward: it is left
    out of every loss, as after a failed verifier.
    """
    config, conversation = self._config, self._of(request)
    answer, tokens = answer or Observation(done=True)._asdict(), []
    if not answer["done"]:
      try:
        tokens = config.observation(answer["text"], answer["role"])
        failed = None if tokens else "the observation has no tokens"
      except InputError as error:
        failed = f"the observation cannot be tokenised: {error}"
    turns, rewards = conversation["turns"] + 1, conversation["rewards"]
    for name, value in answer["rewards"].items():
      rewards[name] = rewards.get(name, 0.0) + value
    # The reward goes to the last token of the turn, which the model wrote.
    reward = Grading(config.weights).value(answer["rewards"])
    request.row.turn_rewards[0, request.length - 1] = reward
    state = answer.get("state", conversation["state"])
    conversation |= {"turns": turns, "state": state}
    conversation |= {"failed": failed} if failed else {}
    number = str(request.row.sample_id[0])
    self._conversations[number] = json.dumps(conversation)
    room = request.max_tokens - 1 - request.length
    if answer["done"] or failed:
      request.row.status[0] = int(Status.FINISHED)
    elif turns >= config.max_turns or len(tokens) > room:
      request.row.status[0] = int(Status.OVERLONG)
    else:
      self._answer(request, tokens, Origin.FOREIGN)
