"""Log-probs of given responses, computed by the sampling program."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.rules import continuous_batching
from jaxrl_llm.sampling.settings import SamplingSettings
from jaxrl_llm.types import Rollout, Status, take_rows


def score(
  engine: Engine, params: Any, rollout: Rollout, *, settings: SamplingSettings
) -> np.ndarray:
  """Scores responses by decoding with their tokens forced.

  On a CPU, log-probs of tokens that the engine drew with these parameters and
  settings are bitwise equal: the same program computes them, and a row depends
  neither on other rows nor on its index.

  Args:
    engine: an exact engine without requests; its parameters and KV cache are
      cleared.
    params: sampler parameters (`fns.for_sampling`).
    rollout: B responses, ended or not; NumPy arrays.
    settings: settings that the responses were sampled with.

  Returns:
    float32 [B, T], 0 where the mask is False.
  """
  logprobs = np.zeros(rollout.mask.shape, np.float32)
  rows = np.flatnonzero(rollout.mask.any(axis=1))
  if not rows.size:
    return logprobs
  scored = take_rows(rollout, rows)
  limits, given = scored.lengths.copy(), scored.tokens.copy()
  scored.lengths[:], scored.mask[:] = 0, False
  scored.status[:] = int(Status.TRUNCATED)
  engine.set_params(params, 0)
  requests = engine.add(
    scored,
    key=jax.random.key(0),  # Nothing is drawn.
    settings=dataclasses.replace(settings, stop_strings=()),
    group_size=1,
  )
  for request, tokens, limit in zip(requests, given, limits.tolist()):
    request.given = tokens[:limit]
    request.max_tokens = request.pause_at = limit
  engine.run(requests, continuous_batching)
  engine.reset()
  logprobs[rows] = scored.behavior_logprobs
  return np.where(rollout.mask, logprobs, np.float32(0))
