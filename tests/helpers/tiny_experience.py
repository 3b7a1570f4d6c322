"""Three responses, small enough to compute estimates by hand."""

import functools

import jax
import numpy as np
from helpers import tiny_run
from helpers.tiny_algorithm import evaluate, make_algorithm

LENGTHS = np.asarray([4, 2, 3])
MASK = np.arange(5)[None] < LENGTHS[:, None]
# float32 numbers whose sums are exact.
VALUES = np.asarray(
  [
    [0.5, 0.25, -0.5, 1.0, 9.0],
    [0.25, 0.5, 9.0, 9.0, 9.0],
    [-0.25, 0.0, 0.75, 9.0, 9.0],
  ],
  np.float32,
)
BEHAVIOR = np.where(MASK, -1.25, 7.0).astype(np.float32)


@functools.cache
def make_estimate(**changes):
  made = make_algorithm(**changes)
  return jax.jit(functools.partial(evaluate, made))


def make_rollout(**changes):
  rollout = tiny_run.random_rollout(np.random.default_rng(0), rows=3, room=5)
  return rollout.replace(
    **{"lengths": LENGTHS, "mask": MASK, "behavior_logprobs": BEHAVIOR}
    | changes
  )


# The trainer's log-probs of row 0 differ: ratios 8, 1.5, 1 and 1/2.
SHIFTED = make_rollout(
  behavior_logprobs=np.where(MASK, -1.0, 7.0).astype(np.float32)
  - np.outer([1, 0, 0], np.log([8.0, 1.5, 1.0, 0.5, 1.0])).astype(np.float32)
)


def make_scores(values=VALUES):
  zeros = np.zeros(MASK.shape, np.float32)
  return {
    "old_logprobs": np.where(MASK, -1.0, 0.0).astype(np.float32),
    "entropies": zeros,
    "ref_logprobs": zeros,
    "values": values,
    "next_values": zeros[:, 0],
  }


def make(
  values=VALUES,
  rewards=(1.0, -1.0, 1.0),
  correct=(True, False, True),
  judged=(True, True, True),
  rollout=None,
  version=0,
  **changes,
):
  """Computes the experience of an algorithm with the given settings."""
  rollout = make_rollout() if rollout is None else rollout
  given = dict(rollout.items()) | make_scores(values)
  return make_estimate(**changes)(
    given
    | {
      "rewards": np.asarray(rewards, np.float32),
      "correct": np.asarray(correct),
      "judged": np.asarray(judged),
      "update_version": np.int32(version),
    }
  )
