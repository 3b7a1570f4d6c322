"""How to sample, as a person says it: plain numbers for a whole call."""

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
  """How to sample; plain numbers that become arrays, so nothing recompiles.

  Attributes:
    temperature: divides the logits; 0 is greedy.
    top_k: keep the k most likely tokens; 0 is off.
    top_p: keep the smallest set with this mass; 1 is off.
    min_p: keep tokens with at least this share of the best one; 0 is off.
    max_new_tokens: most response tokens, at most the engine's room.
    min_new_tokens: response tokens before a stop token may be drawn.
    logit_bias: token -> what is added to its logit; -inf forbids it.
    stop_strings: texts that end a response with the token that completes one.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  max_new_tokens: int | None = None
  min_new_tokens: int = 0
  logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  stop_strings: tuple[str, ...] = ()


def limit_of(settings: SamplingSettings, *, room: int) -> int:
  """Most response tokens in an engine with `room` for so many.

  Raises:
    ValueError: a setting is out of range.
  """
  limit = settings.max_new_tokens
  limit = room if limit is None else limit
  for name, value, valid, allowed in (
    ("max_new_tokens", limit, 1 <= limit <= room, f"1..{room}"),
    (
      "temperature",
      settings.temperature,
      0 <= settings.temperature < np.inf,
      "finite and >= 0",
    ),
    ("top_k", settings.top_k, settings.top_k >= 0, ">= 0"),
    ("top_p", settings.top_p, 0 < settings.top_p <= 1, "in (0, 1]"),
    ("min_p", settings.min_p, 0 <= settings.min_p < 1, "in [0, 1)"),
    (
      "min_new_tokens",
      settings.min_new_tokens,
      0 <= settings.min_new_tokens <= limit,
      f"0..{limit} (max_new_tokens)",
    ),
    (
      "stop_strings",
      settings.stop_strings,
      all(isinstance(s, str) and s for s in settings.stop_strings),
      "a tuple of texts that are not empty",
    ),
  ):
    if not valid:
      raise ValueError(f"{name} must be {allowed}, got {value}")
  return limit


def bias_of(settings: SamplingSettings, vocab_size: int) -> np.ndarray:
  """What is added to the logits, float32 [V].

  Raises:
    ValueError: a token is not in the vocabulary, or a bias is not a number
      below infinity.
  """
  bias = np.zeros(vocab_size, np.float32)
  for token, value in settings.logit_bias.items():
    if not 0 <= token < vocab_size or not value < np.inf:
      raise ValueError(
        f"logit_bias must map tokens 0..{vocab_size - 1} to numbers below"
        f" infinity, got {token}: {value}"
      )
    bias[token] = value
  return bias
