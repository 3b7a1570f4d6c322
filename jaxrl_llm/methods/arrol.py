"""ARRoL: drops uninformative responses early, during generation.

After the first tokens, a probe on the policy's hidden states estimates the
value of every unfinished response. Of the n in a group, k = ⌈K n⌉ continue: the
⌈k / 2⌉ with the highest values and the ⌊k / 2⌋ with the lowest, so that groups
stay mixed. The others get no verdict and enter no loss and no baseline.

The probe is POISE's: a linear function of the middle layer's hidden states,
trained on the rewards of ended responses. Before its first update all values
are equal, and the last responses of a group are dropped. Which responses remain
depends on their tokens, so the gradient is biased towards responses about which
the probe is certain.

Reference: ARRoL 2026. Not implemented: its head on the last layer, and its
weighted votes (`evaluate.py --critic` weights votes with a critic).
"""

import functools
import math

import numpy as np

from jaxrl_llm import config
from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.learner import Algorithm, Settings
from jaxrl_llm.methods import poise
from jaxrl_llm.types import Pruning, Rollout


def balanced(values: np.ndarray, count: int) -> np.ndarray:
  """Returns the indices of the highest and the lowest values, int [count].

  Args:
    values: float [n]; among equal values, earlier ones count as lower.
    count: at most n.
  """
  order = np.argsort(values, kind="stable")
  lowest = count // 2
  return np.append(order[:lowest], order[len(order) - (count - lowest) :])


def surplus(rollout: Rollout, values: np.ndarray, *, keep: float) -> np.ndarray:
  """Returns which responses are dropped, bool [B].

  Args:
    rollout: B unfinished responses.
    values: [B, T]; only the value at the last token is used.
    keep: fraction of a group's responses that continue; the number is rounded
      up.
  """
  last = values[np.arange(len(values)), rollout.lengths - 1]
  drop = np.ones(len(values), bool)
  for group in np.unique(rollout.group):
    rows = np.flatnonzero(rollout.group == group)
    # Rounding errors must not turn an integer into the next one.
    count = math.ceil(round(keep * rows.size, 9))
    drop[rows[balanced(last[rows], count)]] = False
  return drop


def arrol(
  algorithm: Algorithm, s: Settings, *, at: int = 16, keep: float = 0.5
) -> Algorithm:
  """Drops the responses about which a probe is least certain.

  Args:
    algorithm: any algorithm.
    s: settings of the run.
    at: New tokens of a response after which it may be dropped, at least 1.
    keep: Fraction of a group's responses that continue, above 0.
  """
  check_number("at", at, f"[1, {s.sampler.max_response_length - 1}]")
  check_number("keep", keep, "(0, 1]")
  keys = "schedule.stop", "schedule.window", "schedule.streaming"
  why = "pruning compares the responses of whole groups"
  config.exclude(s, keys, why + "; use {key}={value!r}")
  if s.schedule.lag and s.schedule.overlap:
    raise InputError(
      "the learner's models cannot be read during an update; use"
      " schedule.overlap=False"
    )
  drop = functools.partial(surplus, keep=keep)
  return poise.with_probe(algorithm).change(
    pruning=Pruning(at, "poise_values", drop)
  )
