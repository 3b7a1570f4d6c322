"""Batched sampling of responses on static shapes."""

from jaxrl_llm.sampling.choose import Choice, choose
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.rows import groups_of, join, new_rows
from jaxrl_llm.sampling.settings import SamplingSettings

__all__ = [
  "Choice",
  "Engine",
  "SamplingSettings",
  "choose",
  "groups_of",
  "join",
  "new_rows",
]
