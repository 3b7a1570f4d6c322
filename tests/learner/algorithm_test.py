"""An algorithm consists of the functions that the config names."""

import functools

import numpy as np
import pytest
import reference
from helpers.tiny_algorithm import compute, make_algorithm, make_inputs

from jaxrl_llm.learner import core
from jaxrl_llm.methods import vcpo


@pytest.mark.parametrize(
  ("changes", "axes"),
  [
    ({"estimator__lambda_schedule": "constant"}, 1),
    ({"estimator__lambda_schedule": "length_adaptive"}, 1),
    ({"method__use": ("sae",)}, 2),
  ],
)
def test_every_lambda_rule_gives_each_row_or_token_one(changes, axes):
  inputs, made = make_inputs(), make_algorithm(**changes)
  shape = inputs["mask"].shape[:axes]
  assert compute(made, "policy_lambda", inputs).shape == shape


class TestReturns:
  @pytest.mark.parametrize("pretraining", [False, True])
  def test_lambda_of_the_critic_is_its_own(self, pretraining):
    made = make_algorithm(estimator__lambda_value=0.3, estimator__gamma=0.9)
    if pretraining:  # Monte Carlo, whatever the λ.
      made = core.with_monte_carlo_returns(made, gamma=0.9)
    inputs = make_inputs()
    expected = reference.lambda_returns(
      *(inputs[name] for name in ("token_rewards", "values", "mask")),
      gamma=0.9,
      lambda_=1.0 if pretraining else 0.3,
    )
    got = compute(made, "returns", inputs)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)

  def test_an_estimator_without_a_critic_has_no_targets(self):
    made = make_algorithm(estimator__name="group")
    assert made.value_loss is None
    assert "returns" not in made.parts
    assert not {"returns", "value_mask", "old_values"} & made.experience
    assert not {"values", "next_values"} & made.leaves

  def test_a_reward_model_sees_ended_responses_at_their_last_token(self):
    trainable = np.asarray(
      [[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
      bool,
    )
    inputs = {
      "trainable": trainable,
      "truncated": np.asarray([0, 0, 0, 1, 0], bool),
    }
    made = core.as_reward_model(make_algorithm())
    np.testing.assert_array_equal(
      compute(made, "value_mask", inputs),
      [[0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
    )


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    # By default, the response limit of the tiny run.
    ({"loss__mode": "dr-grpo"}, 12.0),
    ({"loss__mode": "dr-grpo", "loss__norm": 7}, 7.0),
    ({}, None),
  ],
)
def test_the_constant_length_of_a_loss_mode(changes, expected):
  assert make_algorithm(**changes).norm == expected


def test_the_step_scale_by_hand():
  # Two responses of weights 1 and 3; the third has no token in the loss.
  old = np.asarray([[0.0, 0.0], [np.log(3.0), 0.0], [5.0, 5.0]], np.float32)
  mask = np.asarray([[1, 1], [1, 0], [0, 0]], bool)
  ratio = (1 + 3) ** 2 / (1 + 9) / 2
  scale = functools.partial(vcpo.ess_step_scale, old, np.zeros_like(old), mask)
  np.testing.assert_allclose(
    scale(ess_reference=0.9), np.sqrt(ratio / 0.9), rtol=1e-6
  )
  # The effective sample ratio exceeds the reference: no larger step.
  assert scale(ess_reference=0.5) == 1.0
