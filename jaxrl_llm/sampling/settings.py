"""Settings of an engine, and sampling parameters of a call."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.sampling.allocator import default_page_size
from jaxrl_llm.sampling.rules import min_free

# With several threads, rows of a bfloat16 product left over from blocks of 8
# are summed in another order than the rest.
EXACT_ROWS = 8


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Sizes of an engine.

  Attributes:
    slots: responses decoded at a time, S.
    max_prompt_length: maximum prompt length in tokens, P.
    max_response_length: maximum response length in tokens, T.
    stop_tokens: tokens that end a response (and are part of it).
    page_size: tokens per page of the KV cache, and maximum number of tokens of
      a slot between two scheduler steps; None is `default_page_size(P + T)`.
    num_draft_tokens: maximum number of draft tokens per step.
    kv_pages: pages of the KV cache, on all devices; 0 is enough for all slots
      at full length.
    exact: whether one decode program of one shape computes everything,
      including contexts, so that log-probs of equal tokens are bitwise equal.
      Needs a multiple of EXACT_ROWS slots per device, and no draft tokens.
    choices: shape and dtype of the experts that are recorded with every token
      (`ModelFns.choices`); None records none.

  Raises:
    ValueError: A size is out of range.
  """

  slots: int
  max_prompt_length: int
  max_response_length: int
  stop_tokens: Sequence[int]
  page_size: int | None = None
  num_draft_tokens: int = 0
  kv_pages: int = 0
  exact: bool = False
  choices: jax.ShapeDtypeStruct | None = None

  def __post_init__(self):
    sizes = "slots", "max_prompt_length", "max_response_length"
    _check(self, numbers.Integral, "[1, inf)", *sizes)
    _check(self, numbers.Integral, "[0, inf)", "num_draft_tokens", "kv_pages")
    if self.page_size is None:  # The only way to set a frozen field.
      object.__setattr__(self, "page_size", default_page_size(self.max_length))
    _check(self, numbers.Integral, "[1, inf)", "page_size")

  @property
  def max_length(self) -> int:
    """Maximum number of tokens of a prompt and its response."""
    return self.max_prompt_length + self.max_response_length

  def pages_of(self, length: int) -> int:
    """Returns the number of pages of a sequence."""
    return -(-length // self.page_size)

  def pages_per_shard(self, shards: int) -> int:
    """Returns the number of pages of the KV cache on each of D shards.

    Raises:
      InputError: The pages cannot hold the longest sequence.
    """
    longest = self.pages_of(self.max_length)
    pages = (self.kv_pages or self.slots * longest) // shards
    if pages < longest:
      raise InputError(
        f"sampler.kv_pages={self.kv_pages} gives {pages} on each of {shards}"
        f" devices, but {self.max_length} tokens of a prompt and its response"
        f" need {longest}; use at least {shards * longest}"
      )
    return pages

  def prompts_per_prefill(self, group_size: int) -> tuple[int, int]:
    """Returns two batch sizes of new prompts: of refills, and of all slots."""
    few = -(-(min_free(self.slots) - 1) // group_size) + 1
    return few, max(few, self.slots // group_size)

  def continued_per_prefill(self, shards: int) -> int:
    """Returns how many continued responses are prefilled at a time.

    They are sharded like slots. Their contiguous KV, padded to the maximum
    length, takes at most an eighth of the memory of the KV cache.
    """
    room = self.pages_per_shard(shards) * self.page_size // 8
    fewest = min(min_free(self.slots) // shards, room // self.max_length)
    return shards * max(1, fewest)


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
  """Sampling parameters; passed as arrays, so new values never recompile.

  Attributes:
    temperature: divides the logits; 0 is greedy.
    top_k: keep the k most likely tokens; 0 is off.
    top_p: keep the smallest set with this probability mass; 1 is off.
    min_p: keep tokens with at least this fraction of the maximum probability; 0
      is off.
    max_new_tokens: maximum number of response tokens, up to
      max_response_length, which is the default.
    min_new_tokens: minimum number of response tokens before a stop token.
    logit_bias: token -> bias added to its logit; -inf forbids it.
    stop_strings: texts that end a response, after the token that completes one.

  Raises:
    ValueError: A setting has the wrong type or is out of range.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  max_new_tokens: int | None = None
  min_new_tokens: int = 0
  logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  stop_strings: tuple[str, ...] = ()

  def __post_init__(self):
    _check(self, numbers.Real, "[0, inf)", "temperature")
    _check(self, numbers.Real, "(0, 1]", "top_p")
    _check(self, numbers.Real, "[0, 1)", "min_p")
    _check(self, numbers.Integral, "[0, inf)", "top_k", "min_new_tokens")
    if self.max_new_tokens is not None:
      _check(self, numbers.Integral, "[1, inf)", "max_new_tokens")
    texts = self.stop_strings
    if not isinstance(texts, (tuple, list)) or not all(
      isinstance(text, str) and text for text in texts
    ):
      raise ValueError(
        f"stop_strings must be a tuple of non-empty texts, got {texts!r}"
      )


def _check(settings: Any, kind: type, interval: str, *names: str) -> None:
  """Checks the types and values of fields."""
  for name in names:
    value = getattr(settings, name)
    if not isinstance(value, kind):
      what = "an integer" if kind is numbers.Integral else "a number"
      raise ValueError(f"{name}={value!r}, expected {what} in {interval}")
    check_number(name, value, interval)


def max_tokens_of(
  settings: SamplingSettings, *, max_response_length: int
) -> int:
  """Returns the maximum number of response tokens.

  Raises:
    ValueError: It is above `max_response_length`, or below the minimum.
  """
  limit = settings.max_new_tokens
  limit = max_response_length if limit is None else limit
  check_number("max_new_tokens", limit, f"[1, {max_response_length}]")
  check_number("min_new_tokens", settings.min_new_tokens, f"[0, {limit}]")
  return limit


def logit_bias_of(settings: SamplingSettings, vocab_size: int) -> np.ndarray:
  """Returns the bias that is added to the logits, float32 [V].

  Raises:
    ValueError: A token is not in the vocabulary, or a bias is not a number
      below infinity.
  """
  bias = np.zeros(vocab_size, np.float32)
  for token, value in settings.logit_bias.items():
    known = isinstance(token, numbers.Integral) and 0 <= token < vocab_size
    if not (known and isinstance(value, numbers.Real) and value < np.inf):
      raise ValueError(
        f"logit_bias must map tokens 0..{vocab_size - 1} to numbers below"
        f" infinity, got {token}: {value}"
      )
    bias[token] = value
  return bias
