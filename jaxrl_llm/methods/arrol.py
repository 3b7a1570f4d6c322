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

from jaxrl_llm.learner import choices
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


def make_pruning(schedule) -> Pruning:
  """Makes the pruning rule of a config group `schedule`."""
  drop = functools.partial(surplus, keep=schedule["prune_keep"])
  return Pruning(schedule["prune_at"], "poise_values", drop)


choices.PRUNINGS["arrol"] = make_pruning
