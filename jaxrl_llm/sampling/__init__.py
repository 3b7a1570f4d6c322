"""Batched sampling of responses on static shapes."""

from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.requests import new_requests
from jaxrl_llm.sampling.rules import (
  complete,
  continuous_batching,
  stop_after_groups,
  stop_after_responses,
)
from jaxrl_llm.sampling.settings import EngineConfig, SamplingSettings
from jaxrl_llm.sampling.speculation import (
  Drafter,
  prompt_lookup,
  quantized_copy,
)
from jaxrl_llm.sampling.stats import EngineStats

__all__ = [
  "Drafter",
  "Engine",
  "EngineConfig",
  "EngineStats",
  "SamplingSettings",
  "complete",
  "continuous_batching",
  "new_requests",
  "prompt_lookup",
  "quantized_copy",
  "stop_after_groups",
  "stop_after_responses",
]
