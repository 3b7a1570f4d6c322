"""Estimators and losses accept lists and reject wrong shapes."""

import numpy as np
import pytest

from jaxrl_llm import arrays, estimators, losses

REWARDS, VALUES = [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]], [[0.5] * 3, [0.25] * 3]
MASK = [[True, True, True], [True, True, False]]


def _same(function, *lists, **settings):
  """Checks that lists give the same result as arrays."""
  given = function(*map(np.asarray, lists), **settings)
  np.testing.assert_array_equal(function(*lists, **settings), given)


class TestLists:
  def test_of_estimators(self):
    _same(estimators.gae, REWARDS, VALUES, MASK, gamma=1.0, lambda_=0.9)
    cut = [True, False]
    _same(estimators.egae, REWARDS, VALUES, MASK, cut, gamma=1.0, lambda_=0.9)
    groups = [0, 0, 1, 1]
    _same(estimators.group_relative, [1, 0, 1, 1], groups, num_groups=2)
    _same(estimators.drop_tail, MASK, cut, tokens=1)

  def test_of_losses(self):
    losses_of = lambda *x: (
      losses.clipped_policy_loss(*x, clip_low=0.2, clip_high=0.28).loss
    )
    _same(losses_of, VALUES, REWARDS, REWARDS)
    _same(losses.kl_k3, VALUES, REWARDS)
    versions = {"proximal_version": 5, "current_version": 7}
    _same(losses.interpolation_share, [3, 5], **versions)


class TestShapes:
  def test_the_message_names_the_argument(self):
    with pytest.raises(
      ValueError, match=r"values has shape \(2, 4\), not that of token_rewards"
    ):
      estimators.gae(REWARDS, np.zeros((2, 4)), MASK, gamma=1.0, lambda_=1.0)

  def test_a_given_shape(self):
    with pytest.raises(ValueError, match=r"x has shape \(1,\), not 2 rows"):
      arrays.of_shape((2,), "2 rows", x=[1.0])
