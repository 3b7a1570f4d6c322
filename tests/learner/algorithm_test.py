"""An algorithm is the choice of functions that the config names."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_algorithm import call, make_algorithm

from jaxrl_llm import config as config_lib
from jaxrl_llm import estimators, losses, masked
from jaxrl_llm.learner import build_algorithm, choices, parts
from jaxrl_llm.methods import vcpo

GAE = jax.jit(estimators.gae)


def make_inputs(seed=0, rows=4, room=6):
  """Responses that have ended, with random rewards and values."""
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
  """One input of an algorithm."""
  return jax.jit(lambda known: parts.evaluate([name], made.parts, known))(
    inputs
  )[name]


def of_gae(inputs):
  return inputs["token_rewards"], inputs["values"], inputs["mask"]


class TestAdvantages:
  def test_constant(self):
    inputs = make_inputs()
    made = make_algorithm(
      estimator__lambda_schedule="constant", estimator__lambda_policy=0.7
    )
    expected = GAE(*of_gae(inputs), gamma=1.0, lambda_=0.7)
    np.testing.assert_allclose(
      compute(made, "advantages", inputs), expected, rtol=1e-5, atol=1e-6
    )

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
    assert made.value_loss is None and not made.value_inputs
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
    made = build_algorithm.as_reward_model(
      make_algorithm(estimator__lambda_value=0.3), gamma=0.9
    )
    np.testing.assert_array_equal(
      compute(made, "value_mask", inputs),
      [[0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
    )
    plain = build_algorithm.with_monte_carlo_returns(
      make_algorithm(), gamma=0.9
    )
    np.testing.assert_array_equal(
      compute(made, "returns", make_inputs()),
      compute(plain, "returns", make_inputs()),
    )


def policy_loss(made, logprobs, advantage):
  """The loss of tokens that lie in one row, whose old log-probs are 0."""
  logprobs = jnp.asarray(logprobs)[None]
  inputs = {
    "logprobs": logprobs,
    "proximal_logprobs": jnp.zeros_like(logprobs),
    "advantages": jnp.asarray(advantage)[None],
  }
  return np.asarray(call(made.policy_loss, inputs).loss)[0]


class TestLosses:
  def test_clip_higher(self):
    made = make_algorithm(loss__clip_low=0.1, loss__clip_high=0.5)
    ratio = jnp.asarray([2.0, 1.4, 0.5, 0.95])
    loss = policy_loss(made, jnp.log(ratio), [1.0, 1.0, -1.0, -1.0])
    np.testing.assert_allclose(loss, [-1.5, -1.4, 0.9, 0.95], rtol=1e-6)

  def test_dual_clip(self):
    made = make_algorithm(loss__dual_clip=3.0)
    loss = policy_loss(made, jnp.log(jnp.asarray([9.0])), [-1.0])
    np.testing.assert_allclose(loss, [3.0], rtol=1e-6)

  @pytest.mark.parametrize(("clip", "expected"), [(None, 0.5), (0.25, 1.53125)])
  def test_value_clip(self, clip, expected):
    made = make_algorithm(loss__clip_value=clip)
    terms = call(
      made.value_loss,
      {
        "values": jnp.asarray([1.0]),
        "returns": jnp.asarray([2.0]),
        "old_values": jnp.asarray([0.0]),
      },
    )
    np.testing.assert_allclose(terms.loss, [expected])
    assert isinstance(terms, losses.ClippedValueLoss)

  def test_plain_settings(self):
    made = make_algorithm(
      loss__mode="seq-mean-token-mean", loss__nll_coefficient=0.25
    )
    assert made.loss_mode == "seq-mean-token-mean"
    nll = made.auxiliary["nll"]
    # Always a mean over the tokens of right responses (VAPO, eq. 9-10).
    assert (nll.coefficient, nll.mask, nll.mode, nll.norm) == (
      0.25,
      "positive_mask",
      "token-mean",
      None,
    )

  @pytest.mark.parametrize(("norm", "expected"), [(0, 12.0), (7, 7.0)])
  def test_a_constant_length_is_the_response_limit_by_default(
    self, norm, expected
  ):
    made = make_algorithm(loss__mode="dr-grpo", loss__norm=norm)
    assert made.loss_norm == expected
    assert make_algorithm().loss_norm is None


class TestInputs:
  def test_are_those_that_something_reads(self):
    always = {"proximal_logprobs", "advantages"}
    for changes, further in (
      ({"loss__nll_coefficient": 0.0}, set()),
      ({}, set()),
      ({"loss__kl_coefficient": 0.1}, {"ref_logprobs"}),
      ({"loss__entropy_coefficient": 0.1}, set()),
      (
        {"off_policy__proximal": "interpolate"},
        {"behavior_logprobs", "interpolation_share"},
      ),
      ({"loss__name": "hapo"}, {"entropy_code"}),
    ):
      assert make_algorithm(**changes).policy_inputs == always | further

  def test_stored_logprobs_need_no_scoring(self):
    scored = {"old_logprobs", "entropies"}
    assert "old_logprobs" in make_algorithm().leaves
    for proximal in ("stored", "interpolate"):
      made = make_algorithm(off_policy__proximal=proximal)
      assert not scored & made.leaves
    assert "entropies" in make_algorithm(loss__name="hapo").leaves


class TestAuxiliary:
  def make(self, **settings):
    """The losses of some settings on two tokens, by hand."""
    settings = {"loss__nll_coefficient": 0.0} | settings
    inputs = {
      "logprobs": jnp.asarray([[-1.0, -2.0]]),
      "entropy": jnp.asarray([[0.5, 1.5]]),
      "ref_logprobs": jnp.asarray([[-1.5, -2.0]]),
    }
    return {
      name: np.asarray(term.coefficient * term.loss(inputs))
      for name, term in make_algorithm(**settings).auxiliary.items()
    }

  def test_by_hand(self):
    got = self.make(
      loss__nll_coefficient=0.1,
      loss__kl_coefficient=0.2,
      loss__kl="k2",
      loss__entropy_coefficient=0.3,
    )
    assert set(got) == {"nll", "kl", "entropy"}
    np.testing.assert_allclose(got["nll"], [[0.1 * 1.0, 0.1 * 2.0]])
    # k2 is half the square of the log-ratio, 0.5 and 0.
    np.testing.assert_allclose(got["kl"], [[0.2 * 0.125, 0.0]])
    # A bonus: more entropy, less loss.
    np.testing.assert_allclose(got["entropy"], [[-0.3 * 0.5, -0.3 * 1.5]])

  def test_regularizers_are_averaged_like_the_policy_loss(self):
    made = make_algorithm(
      loss__mode="dr-grpo",
      loss__norm=7,
      loss__kl_coefficient=0.2,
      loss__entropy_coefficient=0.3,
    )
    for name in ("kl", "entropy"):
      term = made.auxiliary[name]
      assert (term.mask, term.mode, term.norm) == ("policy_mask", "dr-grpo", 7)


class TestNames:
  @pytest.mark.parametrize(
    ("key", "known"),
    [
      ("estimator.name", choices.ESTIMATORS),
      ("estimator.lambda_schedule", choices.LAMBDA_RULES),
      ("estimator.normalize", choices.NORMALIZATIONS),
      ("estimator.gradient_norms", vcpo.SQUARED_NORMS),
      ("loss.name", choices.POLICY_LOSSES),
      ("loss.kl", choices.KL_ESTIMATES),
      ("loss.mode", masked.MODES),
      ("off_policy.correction", choices.CORRECTIONS),
      ("off_policy.proximal", choices.PROXIMALS),
    ],
  )
  def test_the_config_allows_what_exists(self, key, known):
    allowed = config_lib.KEYS[key].allowed
    assert set(allowed) - {"auto"} == set(known)  # One of the others.


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
    # More samples are left than usual: the step is not made longer.
    assert scale(ess_reference=0.5) == 1.0


def test_an_algorithm_cannot_be_changed():
  with pytest.raises(dataclasses.FrozenInstanceError):
    make_algorithm().loss_mode = "dr-grpo"
