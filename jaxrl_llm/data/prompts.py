"""From examples to prompts: templates, and a stream that can be resumed."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from jaxrl_llm.data.sources import Source
from jaxrl_llm.data.tasks import Example
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError

Template = Callable[[Example], list[int]]


@dataclasses.dataclass(frozen=True)
class Prompt:
  """What the sampler reads, and what the reward compares with."""

  prompt_id: int  # Position in the stream.
  tokens: tuple[int, ...]
  text: str  # The tokens, decoded; control tokens included.
  example_id: str
  question: str
  answer: str
  source: str


def completion(
  tokenizer: Tokenizer, *, question_format: str = "{question}"
) -> Template:
  """Returns a template that lets the model continue the question."""
  return lambda example: [
    *tokenizer.prefix,
    *tokenizer.encode(_fill(question_format, example)),
  ]


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
) -> Template:
  """Returns a template that asks in the model's chat format."""
  opening = [{"role": "system", "content": system}] if system else []

  def template(example: Example) -> list[int]:
    content = _fill(question_format, example)
    return tokenizer.apply_chat(
      opening + [{"role": "user", "content": content}]
    )

  return template


def _fill(text: str, example: Example) -> str:
  # Not str.format: LaTeX in a format string is full of braces.
  return re.sub(
    r"\{(question|answer)\}", lambda m: getattr(example, m[1]), text
  )


TEMPLATES = {"completion": completion, "few_shot": few_shot, "chat": chat}


class PromptStream:
  """An endless, shuffled stream of prompts, addressed by position.

  What stands at a position depends on (source, template, seed, position) and
  on nothing else: a position is all the state there is, and a restart resumes
  exactly. Every epoch has its own order.
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
    """Builds the pipeline.

    Args:
      source: examples by index.
      template: turns an example into tokens.
      tokenizer: decodes the prompts' text.
      seed: of the order; None keeps the source's own order.
      max_prompt_length: tokens.
      on_long: 'error' stops at a longer prompt, 'drop' passes over it.

    Raises:
      InputError: the source is empty.
      ValueError: a setting is out of range.
    """
    if on_long not in ("error", "drop"):
      raise ValueError(f"on_long must be 'error' or 'drop', got {on_long!r}")
    if max_prompt_length < 1:
      raise ValueError(
        f"max_prompt_length must be >= 1, got {max_prompt_length}"
      )
    if len(source) == 0:
      raise InputError("the dataset is empty; check data.source and data.path")
    self._template, self._tokenizer = template, tokenizer
    self._max_length, self._drop = max_prompt_length, on_long == "drop"
    self._epoch = len(source)
    pipeline = grain.MapDataset.source(source)
    if seed is not None:
      # The epoch is added to grain's seed: without hashing, the second epoch
      # of seed 0 would be the first epoch of seed 1.
      hashed = np.random.SeedSequence(seed).generate_state(1, np.uint32)[0]
      pipeline = pipeline.shuffle(seed=int(hashed))
    self._pipeline = pipeline.repeat().map(self._encode)

  def __len__(self) -> int:
    """Positions in one epoch."""
    return self._epoch

  def take(self, position: int, n: int) -> list[Prompt]:
    """Returns the `n` prompts from `position` on.

    The next position is `prompts[-1].prompt_id + 1`, whether prompts were
    dropped between or not.

    Args:
      position: where to begin.
      n: how many prompts.

    Raises:
      InputError: a prompt is too long; or all are, with on_long='drop'.
    """
    prompts, misses = [], 0
    while len(prompts) < n:
      fields = self._pipeline[position]
      if fields is None:
        misses += 1
        if misses == min(self._epoch, 10_000):
          raise self._all_too_long(misses)
      else:
        misses = 0
        prompts.append(Prompt(prompt_id=position, **fields))
      position += 1
    return prompts

  def dropped(self, position: int, prompts: Sequence[Prompt]) -> int:
    """Returns how many prompts `take(position, ...)` passed over."""
    end = prompts[-1].prompt_id + 1 if prompts else position
    return end - position - len(prompts)

  def epoch(self) -> list[Prompt]:
    """Returns the first epoch in order, too long prompts dropped or refused."""
    rows = ((i, self._pipeline[i]) for i in range(self._epoch))
    prompts = [Prompt(prompt_id=i, **row) for i, row in rows if row is not None]
    if not prompts:
      raise self._all_too_long(self._epoch)
    return prompts

  def _all_too_long(self, count: int) -> InputError:
    return InputError(
      f"all of {count} prompts in a row are longer than"
      f" data.max_prompt_length={self._max_length}; raise it"
    )

  def _encode(self, example: Example) -> dict[str, Any] | None:
    tokens = tuple(self._template(example))
    if len(tokens) > self._max_length:
      if self._drop:
        return None
      raise InputError(
        f"prompt {example.id!r} has {len(tokens)} tokens, the limit is"
        f" {self._max_length}; raise data.max_prompt_length or set"
        " data.on_long='drop'"
      )
    return {
      "tokens": tokens,
      "text": self._tokenizer.decode(tokens, skip_special=False),
      "example_id": example.id,
      "question": example.question,
      "answer": example.answer,
      "source": example.source,
    }
