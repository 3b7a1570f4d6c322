"""An algorithm consists of the functions that the config names."""

import functools

import jax
import numpy as np
import pytest
from helpers.tiny_algorithm import make_algorithm

from jaxrl_llm import estimators
from jaxrl_llm.learner import build_algorithm, choices, parts
from jaxrl_llm.methods import vcpo


def make_inputs(seed=0, rows=4, room=6):
  """Makes ended responses with random rewards and values."""
  rng = np.random.default_rng(seed)
  lengths = np.asarray([1, 3, 6, 4])
  mask = np.arange(room)[None] < lengths[:, None]
  draw = lambda: rng.normal(size=(rows, room)).astype(np.float32)
  return {
    "token_rewards": draw() * mask,
    "values": draw(),
    "next_values": draw()[:, 0],
    "mask": mask,
    "lengths": lengths,
    "truncated": np.zeros(rows, bool),
    "behavior_logprobs": -np.abs(draw()),
  }


def compute(made, name, inputs):
  """Computes one input of an algorithm."""
  return jax.jit(lambda known: parts.evaluate([name], made.parts, known))(
    inputs
  )[name]


def of_gae(inputs):
  return inputs["token_rewards"], inputs["values"], inputs["mask"]


class TestLambda:
  def test_every_rule_of_the_config_gives_each_row_or_token_one(self):
    inputs = make_inputs()
    for name in choices.LAMBDA_RULES:
      made = make_algorithm(estimator__lambda_schedule=name)
      shape = inputs["mask"].shape[: 2 if name == "segments" else 1]
      assert compute(made, "policy_lambda", inputs).shape == shape


class TestReturns:
  def test_lambda_of_the_critic_is_its_own(self):
    inputs = make_inputs()
    made = make_algorithm(estimator__lambda_value=0.3, estimator__alpha=5.0)
    expected = jax.jit(estimators.lambda_returns)(
      *of_gae(inputs), gamma=1.0, lambda_=0.3
    )
    np.testing.assert_allclose(
      compute(made, "returns", inputs), expected, rtol=1e-6
    )

  def test_an_estimator_without_a_critic_has_no_targets(self):
    made = make_algorithm(estimator__name="group")
    assert made.value_loss is None
    assert "returns" not in made.parts
    assert not {"returns", "value_mask", "old_values"} & made.experience
    assert not {"values", "next_values"} & made.leaves

  def test_pretraining_has_monte_carlo_targets_whatever_the_lambda(self):
    inputs = make_inputs()
    made = make_algorithm(estimator__lambda_value=0.3, estimator__gamma=0.9)
    made = build_algorithm.with_monte_carlo_returns(made, gamma=0.9)
    expected = jax.jit(estimators.lambda_returns)(
      *of_gae(inputs), gamma=0.9, lambda_=1.0
    )
    np.testing.assert_array_equal(compute(made, "returns", inputs), expected)

  def test_a_reward_model_sees_ended_responses_at_their_last_token(self):
    trainable = np.asarray(
      [[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
      bool,
    )
    inputs = {
      "trainable": trainable,
      "truncated": np.asarray([0, 0, 0, 1, 0], bool),
    }
    plain = build_algorithm.with_monte_carlo_returns(
      make_algorithm(estimator__lambda_value=0.3), gamma=0.9
    )
    made = build_algorithm.as_reward_model(plain)
    np.testing.assert_array_equal(
      compute(made, "value_mask", inputs),
      [[0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
    )
    np.testing.assert_array_equal(
      compute(made, "returns", make_inputs()),
      compute(plain, "returns", make_inputs()),
    )


class TestNorm:
  @pytest.mark.parametrize(("norm", "expected"), [(0, 12.0), (7, 7.0)])
  def test_a_constant_length_is_the_response_limit_by_default(
    self, norm, expected
  ):
    made = make_algorithm(loss__mode="dr-grpo", loss__norm=norm)
    assert made.loss_norm == expected
    assert make_algorithm().loss_norm is None


class TestEssStepScale:
  def test_by_hand(self):
    # Two responses of weights 1 and 3; the third has no token in the loss.
    old = np.asarray([[0.0, 0.0], [np.log(3.0), 0.0], [5.0, 5.0]], np.float32)
    mask = np.asarray([[1, 1], [1, 0], [0, 0]], bool)
    ratio = (1 + 3) ** 2 / (1 + 9) / 2
    scale = functools.partial(
      vcpo.ess_step_scale, old, np.zeros_like(old), mask
    )
    np.testing.assert_allclose(
      scale(ess_reference=0.9), np.sqrt(ratio / 0.9), rtol=1e-6
    )
    # The effective sample ratio exceeds the reference: no larger step.
    assert scale(ess_reference=0.5) == 1.0
