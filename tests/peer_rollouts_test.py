"""Tests of scripts/dev/peer_rollouts.py and the lengths that it draws."""

import types

import numpy as np
import peer_rollouts
import pytest
from benchmarks import tail


def options(**changes):
  small = {"shape": "tiny", "prompts": 5, "group_size": 2, "batch": 4}
  small |= {"prompt_length": 3, "new_tokens": 40, "median": 10, "p99": 30}
  return types.SimpleNamespace(**small | changes)


def test_lengths_have_the_quantiles_that_were_asked_for():
  law = {"prompts": 2000, "group_size": 8, "median": 64, "p99": 512}
  lengths = tail.lengths(options(**law, new_tokens=10_000))
  assert lengths.shape == (2000, 8) and lengths.dtype == np.int32
  np.testing.assert_allclose(np.median(lengths), 64, rtol=0.03)
  np.testing.assert_allclose(np.quantile(lengths, 0.99), 512, rtol=0.1)
  short = options(**law, new_tokens=100)
  np.testing.assert_array_equal(tail.lengths(short), np.minimum(lengths, 100))
  assert (tail.lengths(short, seed=1) != tail.lengths(short)).any()


@pytest.mark.parametrize("batches, seen", [(None, 3), (2, 2)])
def test_batches_run_to_their_longest_and_useful_tokens_count(batches, seen):
  calls, asked = [], options(batches=batches)
  result = peer_rollouts.measure(lambda p, n: calls.append((p, n)), asked)
  limits = tail.lengths(asked).reshape(-1)
  parts = np.split(limits, [4, 8])[:seen]
  # Each batch runs once to compile and once for the time.
  assert [n for _, n in calls] == [x.max() for x in parts for _ in range(2)]
  assert [p.shape for p, _ in calls[::2]] == [(len(x), 3) for x in parts]
  np.testing.assert_array_equal(calls[0][0][0], calls[0][0][1])  # A group.
  assert result["tokens"] == sum(x.sum() for x in parts)
  assert result["batches"] == seen
