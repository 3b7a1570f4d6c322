"""Batched sampling of responses with static shapes."""

from jaxrl_llm.sampling.engine import Engine as Engine
from jaxrl_llm.sampling.requests import new_requests as new_requests
from jaxrl_llm.sampling.rules import (
  complete as complete,
  continuous_batching as continuous_batching,
  stop_after_groups as stop_after_groups,
  stop_after_responses as stop_after_responses,
)
from jaxrl_llm.sampling.scoring import score as score
from jaxrl_llm.sampling.settings import (
  EngineConfig as EngineConfig,
  SamplingSettings as SamplingSettings,
)
from jaxrl_llm.sampling.speculation import (
  Drafter as Drafter,
  prompt_lookup as prompt_lookup,
  quantized_copy as quantized_copy,
)
from jaxrl_llm.sampling.stats import EngineStats as EngineStats
