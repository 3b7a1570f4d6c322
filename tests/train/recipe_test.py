"""A recipe is the choice of functions that the config names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from jaxrl_llm import estimators, losses
from jaxrl_llm.train import recipe

GAE = jax.jit(estimators.gae)


def make_recipe(**changes):
  config = tiny_run.make_config("none", **changes)
  return recipe.make_recipe(estimator=config.estimator, loss=config.loss)


def make_inputs(seed=0, rows=4, room=6):
  rng = np.random.default_rng(seed)
  lengths = np.asarray([1, 3, 6, 4])
  mask = np.arange(room)[None] < lengths[:, None]
  draw = lambda: rng.normal(size=(rows, room)).astype(np.float32)
  return draw() * mask, draw(), mask, lengths


class TestAdvantages:
  def test_length_adaptive_gives_each_row_its_lambda(self):
    inputs = make_inputs()
    made = make_recipe(estimator__alpha=0.5, estimator__gamma=0.9)
    got = jax.jit(made.advantages)(*inputs)
    for row in range(4):
      one = tuple(x[row] for x in inputs[:3])
      lambda_ = max(0.0, 1.0 - 1.0 / (0.5 * inputs[3][row]))
      expected = GAE(*one, gamma=0.9, lambda_=lambda_)
      np.testing.assert_allclose(got[row], expected, rtol=1e-5, atol=1e-6)

  def test_constant(self):
    inputs = make_inputs()
    made = make_recipe(
      estimator__lambda_schedule="constant", estimator__lambda_policy=0.7
    )
    expected = GAE(*inputs[:3], gamma=1.0, lambda_=0.7)
    np.testing.assert_allclose(
      jax.jit(made.advantages)(*inputs), expected, rtol=1e-5, atol=1e-6
    )

  def test_every_schedule_of_the_config_exists(self):
    for name in recipe.LAMBDA_SCHEDULES:
      lengths = jnp.asarray([1, 5])
      settings = tiny_run.make_config("none").estimator
      assert recipe.LAMBDA_SCHEDULES[name](settings)(lengths).shape == (2,)


class TestReturns:
  def test_lambda_of_the_critic_is_its_own(self):
    inputs = make_inputs()
    made = make_recipe(estimator__lambda_value=0.3, estimator__alpha=5.0)
    expected = jax.jit(estimators.lambda_returns)(
      *inputs[:3], gamma=1.0, lambda_=0.3
    )
    np.testing.assert_allclose(
      jax.jit(made.returns)(*inputs), expected, rtol=1e-6
    )


class TestLosses:
  def test_clip_higher(self):
    made = make_recipe(loss__clip_low=0.1, loss__clip_high=0.5)
    ratio = jnp.asarray([2.0, 1.4, 0.5, 0.95])
    terms = jax.jit(made.policy_loss)(
      jnp.log(ratio), jnp.zeros(4), jnp.asarray([1.0, 1.0, -1.0, -1.0])
    )
    np.testing.assert_allclose(terms.loss, [-1.5, -1.4, 0.9, 0.95], rtol=1e-6)

  def test_dual_clip(self):
    made = make_recipe(loss__dual_clip=3.0)
    terms = jax.jit(made.policy_loss)(
      jnp.log(jnp.asarray([9.0])), jnp.zeros(1), jnp.asarray([-1.0])
    )
    np.testing.assert_allclose(terms.loss, [3.0], rtol=1e-6)

  @pytest.mark.parametrize(("clip", "expected"), [(None, 0.5), (0.25, 1.53125)])
  def test_value_clip(self, clip, expected):
    made = make_recipe(loss__clip_value=clip)
    terms = jax.jit(made.value_loss)(
      jnp.asarray([1.0]), jnp.asarray([2.0]), jnp.asarray([0.0])
    )
    np.testing.assert_allclose(terms.loss, [expected])
    assert isinstance(terms, losses.ClippedValueLoss)

  def test_plain_settings(self):
    made = make_recipe(
      loss__mode="seq-mean-token-mean", loss__nll_coefficient=0.25
    )
    assert (made.loss_mode, made.nll_coefficient) == (
      "seq-mean-token-mean",
      0.25,
    )

  def test_no_gradient_reaches_the_critic_through_its_targets(self):
    inputs = make_inputs()
    made = make_recipe()
    gradient = jax.jit(
      jax.grad(lambda v: made.returns(inputs[0], v, *inputs[2:]).sum())
    )
    assert not np.asarray(gradient(inputs[1])).any()
