"""From examples to prompts: templates, and the order in which they come."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import grain
import numpy as np

from jaxrl_llm.data.sources import Source
from jaxrl_llm.data.tasks import Example, Prompt
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.types import Responses

Template = Callable[[Example], list[int]]


def completion(
  tokenizer: Tokenizer, *, question_format: str = "{question}"
) -> Template:
  """Returns a template that lets the model continue the question.

  A conversation has its own form: that of the model's chat template.
  """

  def template(example: Example) -> list[int]:
    if example.messages:
      return tokenizer.apply_chat(example.messages)
    text = _fill(question_format, example)
    return [*tokenizer.prefix, *tokenizer.encode(text)]

  return template


def few_shot(
  tokenizer: Tokenizer,
  *,
  pool: Sequence[Example],
  shots: int,
  shot_format: str = "{question}{answer}\n",
  question_format: str = "{question}",
) -> Template:
  """Returns a template that shows solved examples before the question.

  Args:
    tokenizer: the model's.
    pool: solved examples, at least `shots + 1`: the first ones are shown, but
      never the asked question itself.
    shots: how many are shown.
    shot_format: how a solved example is written.
    question_format: how the question is written.

  Raises:
    ValueError: the pool is too small.
  """
  if not 0 <= shots < len(pool):
    raise ValueError(
      "pool must hold more examples than are shown, got"
      f" shots={shots} of {len(pool)}"
    )
  candidates = [pool[i] for i in range(shots + 1)]

  def template(example: Example) -> list[int]:
    if example.messages:
      raise InputError(
        f"{example.id} is a conversation, which has no shots; choose"
        " data.template='chat'"
      )
    shown = [c for c in candidates if c.question != example.question][:shots]
    text = "".join(_fill(shot_format, c) for c in shown)
    text += _fill(question_format, example)
    return [*tokenizer.prefix, *tokenizer.encode(text)]

  return template


def chat(
  tokenizer: Tokenizer,
  *,
  system: str | None = None,
  question_format: str = "{question}",
  kwargs: Mapping[str, Any] | None = None,
) -> Template:
  """Returns a template that asks in the model's chat format.

  Args:
    tokenizer: the model's.
    system: first message, where a conversation has none; None leaves it out.
    question_format: how the question is written. A conversation is used as it
      is.
    kwargs: of the model's chat template, such as Qwen3's enable_thinking.
  """
  opening = [{"role": "system", "content": system}] if system else []

  def template(example: Example) -> list[int]:
    content = _fill(question_format, example)
    asked = example.messages or [{"role": "user", "content": content}]
    if asked[0]["role"] != "system":
      asked = [*opening, *asked]
    return tokenizer.apply_chat(asked, kwargs or {})

  return template


def completion_reply(
  tokenizer: Tokenizer, **_: Any
) -> Callable[[str, str], list[int]]:
  """Returns (text, role) -> tokens of text that the model did not write."""
  return lambda text, role: tokenizer.encode(text)


def chat_reply(
  tokenizer: Tokenizer, *, kwargs: Mapping[str, Any] | None = None, **_: Any
) -> Callable[[str, str], list[int]]:
  """(text, role) -> tokens of a message after the model's, up to its next turn.

  Args:
    tokenizer: the model's.
    kwargs: of the model's chat template.

  Raises:
    InputError: the template does not end a message by a stop token.
  """
  before = [{"role": "user", "content": "?"}]
  before.append({"role": "assistant", "content": "!"})

  def count_stops(tokens: Sequence[int]) -> np.ndarray:
    return np.cumsum(np.isin(tokens, tokenizer.stop_tokens))

  stops = count_stops(tokenizer.apply_chat(before, kwargs or {}))[-1]
  if not stops:
    raise InputError(
      f"{tokenizer.path}: its chat template ends messages by none of the stop"
      " tokens, so turns cannot be told apart"
    )

  def reply(text: str, role: str) -> list[int]:
    said = [*before, {"role": role, "content": text}]
    tokens = tokenizer.apply_chat(said, kwargs or {})
    # The model has written the stop token that ends its message.
    return tokens[np.searchsorted(count_stops(tokens), stops) + 1 :]

  return reply


def _fill(text: str, example: Example) -> str:
  # Not str.format: LaTeX in a format string is full of braces.
  return re.sub(
    r"\{(question|answer)\}", lambda m: getattr(example, m[1]), text
  )


TEMPLATES = {"completion": completion, "few_shot": few_shot, "chat": chat}
# Name -> replies of an environment; other templates use plain text.
REPLIES = {
  "completion": completion_reply,
  "few_shot": completion_reply,
  "chat": chat_reply,
}


@chex.dataclass(frozen=True)
class PromptSourceState:
  """The position of a prompt source."""

  position: int  # In the order of the examples.
  drawn: int  # Prompts so far; numbers the next group.


class PromptSource:
  """An endless stream of prompts, shuffled anew every epoch.

  The prompt at a position depends only on source, template, seed and position,
  so that a restart resumes exactly.
  """

  def __init__(
    self,
    source: Source,
    template: Template,
    tokenizer: Tokenizer,
    *,
    seed: int | None,
    max_prompt_length: int,
    on_long: str = "error",
  ):
    """Builds the order.

    Args:
      source: examples by index.
      template: turns an example into tokens.
      tokenizer: decodes the prompts' text.
      seed: of the order; None keeps the source's own order.
      max_prompt_length: tokens.
      on_long: 'error' stops at a longer prompt, 'drop' passes over it.

    Raises:
      InputError: the source is empty.
    """
    if len(source) == 0:
      raise InputError("the dataset is empty; check data.source and data.path")
    self._source, self._template = source, template
    self._tokenizer = tokenizer
    self._max_length, self._drop = max_prompt_length, on_long == "drop"
    order = grain.MapDataset.source(range(len(source)))
    if seed is not None:
      # The epoch is added to grain's seed: without hashing, the second epoch
      # of seed 0 would be the first epoch of seed 1.
      hashed = np.random.SeedSequence(seed).generate_state(1, np.uint32)[0]
      order = order.shuffle(seed=int(hashed))
    self._order = order.repeat()

  def __len__(self) -> int:
    """Examples in one epoch."""
    return len(self._source)

  def init(self) -> PromptSourceState:
    """The state before the first draw."""
    return PromptSourceState(position=0, drawn=0)

  def draw(
    self, state: PromptSourceState, n: int
  ) -> tuple[list[Prompt], PromptSourceState]:
    """The next `n` prompts.

    Raises:
      InputError: a prompt is too long; or all are, with on_long='drop'.
    """
    prompts, position, misses = [], state.position, 0
    while len(prompts) < n:
      example_id = int(self._order[position])
      prompt = self.prompt(example_id, state.drawn + len(prompts))
      if prompt is not None:
        prompts.append(prompt)
      misses = 0 if prompt is not None else misses + 1
      if misses == min(len(self), 10_000):
        raise InputError(
          f"all of {misses} prompts in a row are longer than"
          f" data.max_prompt_length={self._max_length}; raise it"
        )
      position += 1
    return prompts, PromptSourceState(position=position, drawn=state.drawn + n)

  def observe(
    self, state: PromptSourceState, responses: Responses
  ) -> PromptSourceState:
    """Learns from a batch of judged responses; this source learns nothing.

    A curriculum overrides this and `draw`.
    """
    del responses
    return state

  def check(self, example_ids: Sequence[int]) -> list[bool]:
    """Whether rows of the data make prompts; False for one that is dropped.

    Raises:
      InputError: a prompt is too long or cannot be tokenized.
    """
    return [self._tokens(self._source[i]) is not None for i in example_ids]

  def _tokens(self, example: Example) -> tuple[int, ...] | None:
    """The tokens of a prompt; None if it is too long and dropped."""
    tokens = tuple(self._template(example))
    if len(tokens) <= self._max_length:
      return tokens
    if self._drop:
      return None
    raise InputError(
      f"prompt {example.id!r} has {len(tokens)} tokens, the limit is"
      f" {self._max_length}; raise data.max_prompt_length or set"
      " data.on_long='drop'"
    )

  def prompt(self, example_id: int, group_id: int) -> Prompt | None:
    """A prompt by its row of the data; None if it is too long and dropped."""
    example = self._source[example_id]
    tokens = self._tokens(example)
    if tokens is None:
      return None
    return Prompt(
      example_id=example_id,
      group_id=group_id,
      tokens=tokens,
      text=self._tokenizer.decode(tokens, skip_special=False),
      **vars(example),
    )


# Name -> prompt source; see `register.prompt_source`.
PROMPT_SOURCES: dict[str, Callable[..., PromptSource]] = {
  "shuffled": PromptSource
}
