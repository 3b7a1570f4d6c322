"""Batched sampling of responses on static shapes."""

from jaxrl_llm.sampling.choose import Choice, choose
from jaxrl_llm.sampling.engine import Engine, SamplingSettings

__all__ = ["Choice", "Engine", "SamplingSettings", "choose"]
