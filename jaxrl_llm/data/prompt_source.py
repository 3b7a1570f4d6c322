"""Templates that turn examples into prompts, and the source of prompts."""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import numpy as np

from jaxrl_llm.data.sources import MOST_READ, Source
from jaxrl_llm.data.tasks import Example, Prompt
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.types import Responses

MOST_SOURCES = 50  # Maximum number of data sources with separate metrics.
Template = Callable[[Example], list[int]]


def completion(
  tokenizer: Tokenizer, *, question_format: str = "{question}"
) -> Template:
  """Returns a template that lets the model continue the question.

  Conversations use the model's chat template.
  """
  converse = functools.cache(lambda: chat(tokenizer))

  def template(example: Example) -> list[int]:
    if example.messages:
      return converse()(example)
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
    pool: solved examples, at least `shots + 1`. The first ones are shown, but
      not the question itself.
    shots: number of examples to show.
    shot_format: format of a solved example.
    question_format: format of the question.

  Raises:
    ValueError: The pool is too small.
  """
  if not 0 <= shots < len(pool):
    raise ValueError(
      "the pool must have more examples than shots, got"
      f" shots={shots} of {len(pool)}"
    )
  candidates = [pool[i] for i in range(shots + 1)]

  def template(example: Example) -> list[int]:
    if example.messages:
      raise InputError(
        f"{example.id} is a conversation, which cannot be shown with shots;"
        " choose data.template='chat'"
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
  """Returns a template in the model's chat format.

  Args:
    tokenizer: the model's.
    system: system message for conversations without one; None adds none.
    question_format: format of the question; conversations are left unchanged.
    kwargs: keyword arguments of the model's chat template, such as Qwen3's
      enable_thinking; the column `chat_template_kwargs` of a row overrides
      them, and its column `tools` describes tools.

  Raises:
    InputError: Answers end with a token that is no stop token.
  """
  kwargs = dict(kwargs or {})
  _check_end(tokenizer, kwargs)
  opening = [{"role": "system", "content": system}] if system else []

  def template(example: Example) -> list[int]:
    content = _fill(question_format, example)
    messages = example.messages or [{"role": "user", "content": content}]
    if messages[0]["role"] != "system":
      messages = [*opening, *messages]
    messages = [*messages, *example.said]
    variables = {"tools": _column(example, "tools", list) or None, **kwargs}
    own = _column(example, "chat_template_kwargs", dict)
    # Files with fixed columns have None for absent keys.
    variables |= {k: x for k, x in own.items() if x is not None}
    if example.said and messages[-1]["role"] == "assistant":
      variables["add_generation_prompt"] = False
    return tokenizer.apply_chat(messages, variables)

  return template


def _column(example: Example, name: str, kind: type) -> Any:
  """Returns a column of the row, perhaps JSON text; empty if there is none."""
  value = example.columns.get(name)
  what = f"{example.id}: column {name!r} is no {kind.__name__}"
  with as_input_error(what, "correct or rename it", TypeError, ValueError):
    value = (json.loads(value) if isinstance(value, str) else value) or kind()
    if not isinstance(value, kind):
      raise TypeError(f"got {type(value).__name__}")
  return value


_TALK = (
  {"role": "user", "content": "?"},
  {"role": "assistant", "content": "!"},
)


def _check_end(tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> None:
  """Refuses a chat template whose answers end with no stop token."""
  tokens, pieces = [], []
  # Raised, and explained, where the template is needed.
  with contextlib.suppress(InputError):
    whole = {**kwargs, "add_generation_prompt": False}
    tokens = tokenizer.apply_chat(_TALK, whole)
    pieces = tokenizer.pieces(tokens)
  last = max((i for i, x in enumerate(pieces) if "!" in x), default=len(pieces))
  ends = [i for i in range(last + 1, len(pieces)) if pieces[i].strip()]
  if ends and tokens[ends[0]] not in tokenizer.stop_tokens:
    raise InputError(
      f"{tokenizer.path}: the chat template ends answers with"
      f" {pieces[ends[0]]!r}, which is no stop token, so that no response would"
      f" end there; add its number {tokens[ends[0]]} to eos_token_id in"
      " generation_config.json"
    )


def completion_reply(
  tokenizer: Tokenizer, **_: Any
) -> Callable[[str | Sequence[str], str], list[int]]:
  """Returns (text, role) -> tokens of text that the model did not generate.

  Several texts are lines.
  """
  return lambda text, role: tokenizer.continued("\n".join(several(text)))


def chat_reply(
  tokenizer: Tokenizer, *, kwargs: Mapping[str, Any] | None = None, **_: Any
) -> Callable[[str | Sequence[str], str], list[int]]:
  """Returns (text, role) -> tokens of a message, up to the model's next turn.

  Several texts are a message each.

  Args:
    tokenizer: the model's.
    kwargs: keyword arguments of the model's chat template.

  Raises:
    InputError: The template has no stop token at the end of messages.
  """

  def count_stops(tokens: Sequence[int]) -> np.ndarray:
    return np.cumsum(np.isin(tokens, tokenizer.stop_tokens))

  stops = count_stops(tokenizer.apply_chat(_TALK, kwargs or {}))[-1]
  if not stops:
    raise InputError(
      f"{tokenizer.path}: the chat template must end every message with a stop"
      " token, or turns cannot be separated; use another model or template"
    )

  def reply(text: str | Sequence[str], role: str) -> list[int]:
    messages = [{"role": role, "content": x} for x in several(text)]
    tokens = tokenizer.apply_chat([*_TALK, *messages], kwargs or {})
    # The model has already generated the stop token that ends its message.
    return tokens[np.searchsorted(count_stops(tokens), stops) + 1 :]

  return reply


def several(text: str | Sequence[str]) -> Sequence[str]:
  """Returns a list of one or more texts."""
  return [text] if isinstance(text, str) else text


def _texts(example: Example) -> list[str]:
  """Returns the texts of a question."""
  messages = example.messages or ({"content": example.question},)
  return [str(message["content"]) for message in messages]


def _fill(text: str, example: Example) -> str:
  # Not str.format: LaTeX in a format string is full of braces.
  return re.sub(
    r"\{(question|answer)\}", lambda m: getattr(example, m[1]), text
  )


TEMPLATES = {"completion": completion, "few_shot": few_shot, "chat": chat}
# Template -> format of an environment's replies; default `completion_reply`.
REPLIES = {"chat": chat_reply}


@chex.dataclass(frozen=True)
class PromptSourceState:
  """Position of a prompt source."""

  position: int  # Position in the order of the examples.
  drawn: int  # Number of prompts drawn so far; the next group id.


class PromptSource:
  """Infinite stream of prompts, reshuffled every epoch.

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
    """Builds the order of the examples.

    Args:
      source: examples by index.
      template: turns an example into tokens.
      tokenizer: decodes the prompts' text.
      seed: seed of the order; None keeps the source's order.
      max_prompt_length: maximum length in tokens.
      on_long: 'error' raises for longer prompts, 'drop' skips them.

    Raises:
      InputError: The source is empty.
    """
    import grain  # Imported here: only training draws prompts.

    if len(source) == 0:
      raise InputError("the dataset is empty; check data.source and data.path")
    self._source, self._template = source, template
    self._tokenizer = tokenizer
    self._max_length, self._drop = max_prompt_length, on_long == "drop"
    order = grain.MapDataset.source(range(len(source)))
    if seed is not None:
      # Grain adds the epoch to its seed: without hashing, the second epoch of
      # seed 0 would be the first epoch of seed 1.
      hashed = np.random.SeedSequence(seed).generate_state(1, np.uint32)[0]
      order = order.shuffle(seed=int(hashed))
    self._order = order.repeat()

  def __len__(self) -> int:
    """Returns the number of examples in one epoch."""
    return len(self._source)

  @property
  def vocab_size(self) -> int:
    """One more than the largest token id of the tokenizer."""
    return self._tokenizer.vocab_size

  def init(self) -> PromptSourceState:
    """Returns the state before the first draw."""
    return PromptSourceState(position=0, drawn=0)

  def draw(
    self, state: PromptSourceState, n: int
  ) -> tuple[list[Prompt], PromptSourceState]:
    """Draws the next `n` prompts.

    Raises:
      InputError: A prompt is too long; with on_long='drop', all prompts are.
    """
    prompts, position, misses = [], state.position, 0
    while len(prompts) < n:
      example_id = int(self._order[position])
      prompt = self.prompt(example_id, state.drawn + len(prompts))
      if prompt is not None:
        prompts.append(prompt)
      misses = 0 if prompt is not None else misses + 1
      # This many consecutive positions include every prompt of the data.
      if misses == min(2 * len(self) - 1, 10_000):
        raise InputError(
          f"{misses} prompts in a row are longer than"
          f" data.max_prompt_length={self._max_length}; raise it"
        )
      position += 1
    return prompts, PromptSourceState(position=position, drawn=state.drawn + n)

  def observe(
    self, state: PromptSourceState, responses: Responses
  ) -> PromptSourceState:
    """Updates the state from the judged responses of a step; here a no-op.

    A curriculum overrides this and `draw`.

    Args:
      state: the state after the draws of the step.
      responses: all judged responses, each of them once, including those that
        dynamic sampling discarded and those to the prompts of `again`.
    """
    return state

  def again(
    self, state: PromptSourceState, judged: Any
  ) -> tuple[list[Prompt], PromptSourceState]:
    """Draws more prompts once the batch of a step has been judged; here none.

    Called once per step. Their responses are sampled with the same weights and
    join the batch; a prompt with the group id of a judged prompt extends that
    group.

    Args:
      state: the state after the draws of the step.
      judged: the step's responses with prompts, texts and verdicts (a
        `rewards.judge.Judged`), including those that dynamic sampling discards.
    """
    return [], state

  @functools.cached_property
  def has_several_sources(self) -> bool:
    """Whether the examples name 2 to `MOST_SOURCES` data sources.

    Reads all examples once; more than `sources.MOST_READ` are not read.
    """
    rows = range(len(self) if len(self) <= MOST_READ else 0)
    return 1 < len({self._source[i].source for i in rows}) <= MOST_SOURCES

  def check(self, example_ids: Sequence[int]) -> list[bool]:
    """Tokenizes rows of the data; returns False for each dropped row.

    Raises:
      InputError: A prompt is too long or cannot be tokenized.
    """
    return [self._tokens(self._source[i]) is not None for i in example_ids]

  def spelled(self, example_ids: Sequence[int]) -> list[str]:
    """Returns the first name of a control token in each question, or ''."""
    return [
      self._tokenizer.spelled("\n".join(_texts(self._source[i])))
      for i in example_ids
    ]

  def answer(self, example_id: int) -> str:
    """Returns the answer in a row of the data."""
    return self._source[example_id].answer

  def column(self, name: str, example_ids: np.ndarray) -> np.ndarray:
    """Returns the numbers in a column of the data, float32 [B].

    Args:
      name: name of the column.
      example_ids: rows of the data, [B].

    Raises:
      InputError: The column is missing or not a number in a row.
    """
    out = []
    for example in (self._source[int(i)] for i in example_ids):
      with as_input_error(
        f"{example.id}: column {name!r}",
        "a part of the method needs a number in it",
        *(KeyError, TypeError, ValueError),
      ):
        out.append(float(example.columns[name]))
    return np.asarray(out, np.float32)

  def _tokens(self, example: Example) -> tuple[int, ...] | None:
    """Returns the tokens of a prompt; None if it is dropped."""
    # Texts far beyond the limit are not tokenised.
    tokens = range(self._tokenizer.fewest(_texts(example)))
    if len(tokens) <= self._max_length:
      tokens = tuple(self._template(example))
    if not tokens:
      raise InputError(
        f"prompt {example.id!r} has no tokens; correct data.template"
      )
    if len(tokens) <= self._max_length:
      return tokens
    if self._drop:
      return None
    raise InputError(
      f"prompt {example.id!r} has {len(tokens)} tokens, the limit is"
      f" {self._max_length}; raise data.max_prompt_length or set"
      " data.on_long='drop'"
    )

  def example(self, example_id: int, group_id: int) -> Example:
    """Returns the example in a row of the data, as used for one draw."""
    return self._source[example_id]

  def prompt(self, example_id: int, group_id: int) -> Prompt | None:
    """Returns the prompt for a row of the data; None if it is dropped."""
    example = self.example(example_id, group_id)
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
PROMPT_SOURCES: dict[str, Any] = {"shuffled": PromptSource}
