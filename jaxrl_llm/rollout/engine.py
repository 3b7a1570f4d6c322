"""The interface between the rollout worker and an engine."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import chex

from jaxrl_llm.sampling import EngineConfig, EngineStats, SamplingSettings
from jaxrl_llm.sampling.rules import SchedulingRule
from jaxrl_llm.sampling.scheduler import TurnHook
from jaxrl_llm.types import Rollout


class RolloutEngine(Protocol):
  """Samples responses; `sampling.Engine` is the built-in one.

  Attributes:
    config: sizes; the worker reads the lengths of prompts and responses.
    stats: counters of all calls.
  """

  config: EngineConfig
  stats: EngineStats

  def generate_window(
    self,
    params: Any,
    requests: Rollout,
    *,
    group_size: int,
    window: int,
    key: chex.PRNGKey,
    settings: SamplingSettings,
    version: int,
    rule: SchedulingRule,
    processor_states: Mapping[str, Any] | None,
    turns: TurnHook | None,
  ) -> Rollout:
    """Continues responses by at most `window` tokens.

    A registered engine always gets the rule of continuous batching, no states
    and no hook: what needs others requires the built-in engine.

    Args:
      params: sampler parameters (`ModelFns.for_sampling`).
      requests: unfinished responses, at least one; NumPy arrays.
      group_size: usual number of responses per prompt.
      window: maximum number of new tokens per response.
      key: key of the run. A response must depend on weights, prompt and
        `sample_id` only, or a resumed run does not repeat.
      settings: sampling parameters.
      version: version of the parameters, recorded with every new token.
      rule: decides when the call ends.
      processor_states: states of logits processors.
      turns: called with the requests that left their slots.

    Returns:
      The rows, in order. New tokens have log-probs, version, mask and origin;
      `window_start` is the length before the call, and a row whose `status` is
      TRUNCATED can be continued.
    """


# Name -> (fns, config, tokenizer, **sampler.engine_settings) -> engine; '' is
# the built-in one.
ENGINES: dict[str, Callable[..., RolloutEngine] | None] = {"": None}
