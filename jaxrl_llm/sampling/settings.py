"""How to sample, as a person says it: plain numbers for a whole call."""

import dataclasses

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
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  max_new_tokens: int | None = None


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
  ):
    if not valid:
      raise ValueError(f"{name} must be {allowed}, got {value}")
  return limit
