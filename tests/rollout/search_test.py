"""Test-time search: weights, and the choice of prefixes that continue."""

import numpy as np
import pytest
from helpers import tiny_run

from jaxrl_llm.rollout import search
from jaxrl_llm.types import Status, ended

COUNTS = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]])


def test_particles_have_the_weights_of_their_odds():
  weights = search.odds(np.array([0.9, 0.1, 0.5, 0.5]), None)
  np.testing.assert_allclose(weights, [0.81, 0.01, 0.09, 0.09])
  assert search.systematic(weights).tolist() == [0, 0, 0, 2]


def test_equal_responses_share_the_weight_of_their_direction():
  of = lambda *chances: search.by_direction(np.array(chances), COUNTS)
  np.testing.assert_allclose(of(0.5, 0.5, 0.5), [0.25, 0.25, 0.5])
  found = of(0.6, 0.6, 0.5)
  np.testing.assert_allclose(found, [0.3655, 0.3655, 0.2689], atol=1e-4)
  # Another copy does not change the weight of its direction.
  more = search.by_direction(
    np.array([0.6, 0.6, 0.6, 0.5]), COUNTS[[0, 0, 0, 2]]
  )
  assert more[-1] == pytest.approx(found[-1])


def test_a_beam_keeps_the_best_quarter():
  chances = np.array([0.1, 0.9, 0.2, 0.3, 0.8, 0.4, 0.5, 0.6])
  found = search.systematic(search.best(chances, None))
  assert found.tolist() == [1, 1, 1, 1, 4, 4, 4, 4]
  assert search.systematic(search.best(chances[:2], None)).tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_indices_are_in_proportion(seed):
  weights = np.random.default_rng(seed).dirichlet(np.ones(8))
  count = np.bincount(search.systematic(weights), minlength=8)
  assert count.sum() == 8 and (np.abs(count - 8 * weights) < 1).all()


class Writer:
  """Writes tokens from sample id and token index, at most three."""

  def __init__(self):
    self.windows, self.tokens = [], 0

  def __call__(self, rows, *, window):
    self.windows.append(window)
    for row in range(len(rows.lengths)):
      for _ in range(window):
        at = rows.lengths[row]
        rows.tokens[row, at] = 10 * rows.sample_id[row] + at
        rows.lengths[row] += 1
        self.tokens += 1
        if rows.lengths[row] == 3:
          rows.status[row] = int(Status.FINISHED)
          break
    return rows


def begin(groups, size):
  rows = tiny_run.random_rollout(
    np.random.default_rng(0), rows=groups * size, group_size=size, room=16
  )
  zeros = np.zeros_like(rows.tokens)
  return rows.replace(
    tokens=zeros,
    lengths=np.zeros_like(rows.lengths),
    status=np.full_like(rows.status, int(Status.TRUNCATED)),
    sample_id=np.arange(groups * size, dtype=np.int32),
  )


@pytest.mark.parametrize("name", search.SEARCHES)
def test_copies_go_on_with_numbers_of_their_own(name):
  """The critic knows that responses 2 and 4 are correct."""
  write, begun = Writer(), begin(2, 4)
  chance = lambda rows: np.where(
    np.isin(rows.tokens[:, 0], (20, 40)), 0.99, 0.01
  )
  found = search.SEARCHES[name](write, chance, begun)
  assert ended(found).all() and found.sample_id.tolist() == list(range(8))
  assert found.group.tolist() == begun.group.tolist()
  assert write.windows == [2, 2] and write.tokens == 8 * 3
  firsts = found.tokens[:, 0].tolist()
  if name == "dora":  # Copies do not add weight.
    assert firsts.count(20) >= 3 and firsts.count(40) >= 3
  else:
    assert firsts == [20] * 4 + [40] * 4
  # The tokens after the copy differ per response.
  assert found.tokens[:, 2].tolist() == [10 * i + 2 for i in range(8)]


def test_problems_whose_responses_have_ended_stay():
  write, begun = Writer(), begin(2, 2)
  begun.lengths[2:], begun.tokens[2:, 0] = 2, (7, 8)  # End at once.
  chance = lambda rows: np.where(rows.sample_id % 2, 0.99, 0.01)
  found = search.SEARCHES["particles"](write, chance, begun)
  assert found.tokens[:, 0].tolist() == [10, 10, 7, 8]
