"""Batched sampling of responses on static shapes."""

from jaxrl_llm.sampling.choose import Choice, choose
from jaxrl_llm.sampling.draft import Drafter, prompt_lookup, quantized_copy
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.rows import groups_of, join, new_rows
from jaxrl_llm.sampling.schedule import (
  Decision,
  Schedule,
  View,
  complete,
  first_groups,
  refill,
)
from jaxrl_llm.sampling.settings import SamplingSettings
from jaxrl_llm.sampling.writer import Spent, Usage

__all__ = [
  "Choice",
  "Decision",
  "Drafter",
  "Engine",
  "SamplingSettings",
  "Schedule",
  "Spent",
  "Usage",
  "View",
  "choose",
  "complete",
  "first_groups",
  "groups_of",
  "join",
  "new_rows",
  "prompt_lookup",
  "quantized_copy",
  "refill",
]
