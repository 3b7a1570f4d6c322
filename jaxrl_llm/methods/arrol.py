"""ARRoL: responses that would teach little are given up while they are written.

After the first tokens, a probe on the policy's hidden states values every
unfinished response. Of n in a group, k = ⌈K n⌉ go on: the ⌈k / 2⌉ with the
highest value and the ⌊k / 2⌋ with the lowest, so that groups stay mixed. The
others have no verdict, and enter no loss and no baseline.

The probe is that of POISE: a linear function of the states of the middle layer,
trained on the rewards of the responses that ended. Before its first update all
values are equal, and the last responses of a group are given up. Which
responses remain depends on their tokens, so that the gradient is biased towards
those about which the probe is certain.

Reference: ARRoL 2026. Not implemented: its head on the last layer, and its
weighted votes (`evaluate.py --critic` has those of a critic).
"""

import functools
import math

import numpy as np

from jaxrl_llm.learner import choices
from jaxrl_llm.types import Pruning, Rollout


def balanced(values: np.ndarray, count: int) -> np.ndarray:
  """Returns the indices of the highest and the lowest values, int [count].

  Args:
    values: float [n]; of equal ones the first count as lower.
    count: at most n.
  """
  order = np.argsort(values, kind="stable")
  lowest = count // 2
  return np.append(order[:lowest], order[len(order) - (count - lowest) :])


def surplus(rollout: Rollout, values: np.ndarray, *, keep: float) -> np.ndarray:
  """Returns the responses that are given up, bool [B].

  Args:
    rollout: B unfinished responses.
    values: [B, T]; that at the last token counts.
    keep: fraction of the responses of a group that go on, rounded up.
  """
  last = values[np.arange(len(values)), rollout.lengths - 1]
  drop = np.ones(len(values), bool)
  for group in np.unique(rollout.group):
    rows = np.flatnonzero(rollout.group == group)
    count = math.ceil(keep * rows.size)
    drop[rows[balanced(last[rows], count)]] = False
  return drop


def make_pruning(schedule) -> Pruning:
  """Makes the pruning of a config group `schedule`."""
  drop = functools.partial(surplus, keep=schedule["prune_keep"])
  return Pruning(schedule["prune_at"], "poise_values", drop)


choices.PRUNINGS["arrol"] = make_pruning
