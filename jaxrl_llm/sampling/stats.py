"""Counters and times of an engine."""

import operator
from typing import NamedTuple


class DecodeCall(NamedTuple):
  """One call of the decode program, with the prefills that it waited for."""

  slots: int  # Batch size.
  steps: int  # Decode steps.
  kv_capacity: int  # Tokens that the pages of its responses had room for.
  prefill_calls: int
  prefill_tokens: int
  seconds: float  # Total, including work on the host.


class EngineStats(NamedTuple):
  """Counters of calls of an engine; they add and subtract."""

  decode_calls: int = 0  # One a scheduler step.
  decode_steps: int = 0  # One after the other.
  slot_steps: int = 0  # Steps times the batch size that they had.
  tokens: int = 0  # Written.
  prefill_calls: int = 0
  prefill_tokens: int = 0  # Context tokens whose KV was recomputed.
  preemptions: int = 0
  wall_s: float = 0.0
  host_s: float = 0.0  # Part of wall_s without a decode call.

  def __add__(self, other: "EngineStats") -> "EngineStats":
    return EngineStats(*map(operator.add, self, other))

  def __sub__(self, other: "EngineStats") -> "EngineStats":
    return EngineStats(*map(operator.sub, self, other))
