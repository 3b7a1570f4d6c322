"""Limits of value-based credit that follow from the formulas, as numbers.

docs/studies/critic.md explains their consequences for runs.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import estimators


def one_response(length, reward=1.0):
  rewards = jnp.zeros((1, length)).at[0, -1].set(reward)
  return rewards, jnp.ones((1, length), bool)


@pytest.mark.parametrize(
  ("lambda_", "expected"),
  [(0.95, [-0.475, -0.5, 0, 0]), (1.0, [-0.5, -0.5, 0, 0])],
)
def test_values_over_the_reward_punish_a_correct_response(lambda_, expected):
  rewards, mask = one_response(4)
  values = jnp.array([[1.5, 1.5, 1.0, 1.0]])
  found = estimators.gae(rewards, values, mask, gamma=1.0, lambda_=lambda_)
  np.testing.assert_allclose(found[0], expected, atol=1e-6)


@pytest.mark.parametrize(
  ("length", "alpha", "expected"),
  [
    (100, 0.05, 2.55e-10),
    (100, 2.0, 0.6088),
    (25, 0.05, 1.7e-17),
    (25, 2.0, 0.6158),
    (8192, 0.05, 2.05e-9),
  ],
)
def test_a_constant_critic_leaves_the_first_token_what_alpha_says(
  length, alpha, expected
):
  # A_0 / (R - c) = λ^(l-1), which tends to e^(-1/α) at every length.
  rewards, mask = one_response(length)
  lambda_ = estimators.length_adaptive_lambda(jnp.array([length]), alpha=alpha)
  values = jnp.full((1, length), 0.25)
  found = estimators.gae(rewards, values, mask, gamma=1.0, lambda_=lambda_)
  # The estimator computes in float32, relative to the largest advantage.
  assert found[0, 0] / 0.75 == pytest.approx(expected, rel=2e-3, abs=2e-5)


def test_a_constant_lambda_forgets_with_length():
  for length, expected in ((100, 0.00623), (25, 0.292)):
    rewards, mask = one_response(length)
    values = jnp.zeros((1, length))
    found = estimators.gae(rewards, values, mask, gamma=1.0, lambda_=0.95)
    assert found[0, 0] == pytest.approx(expected, rel=2e-3)
