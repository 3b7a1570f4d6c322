"""Counters and timings of an engine."""

import operator
from typing import NamedTuple


class DecodeCall(NamedTuple):
  """One call of the decode program, with the prefills before it."""

  slots: int  # Batch size.
  steps: int  # Decode steps.
  kv_capacity: int  # Capacity of the responses' pages, in tokens.
  prefill_calls: int
  prefill_tokens: int
  seconds: float  # Total, including work on the host.


class EngineStats(NamedTuple):
  """Counters of an engine, which can be added and subtracted."""

  decode_calls: int = 0  # One per scheduler step.
  decode_steps: int = 0  # Sequential steps, over all calls.
  slot_steps: int = 0  # Sum of the batch sizes of all decode steps.
  tokens: int = 0  # New response tokens.
  prefill_calls: int = 0
  prefill_tokens: int = 0  # Context tokens whose KV was recomputed.
  preemptions: int = 0
  wall_s: float = 0.0
  host_s: float = 0.0  # Part of wall_s outside of decode calls.

  def __add__(self, other: "EngineStats") -> "EngineStats":
    return EngineStats(*map(operator.add, self, other))

  def __sub__(self, other: "EngineStats") -> "EngineStats":
    return EngineStats(*map(operator.sub, self, other))
