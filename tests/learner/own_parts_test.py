"""Models trained beside the policy, and user-defined losses and optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import recipes, tiny_run
from helpers.registries import registries  # noqa: F401
from helpers.tiny_algorithm import make_algorithm

from jaxrl_llm import metrics, register
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import providers
from jaxrl_llm.learner.algorithm import MemberSpec
from jaxrl_llm.learner.lower import lower
from jaxrl_llm.learner.parts import Auxiliary, part
from jaxrl_llm.methods import poise
from jaxrl_llm.trainer import build
from jaxrl_llm.types import Responses, named_parts


def by_digits(part_digits, part_absent, mask, *, bonus=1.0):
  """An estimator that reads parts of the reward."""
  return jnp.where(mask, (bonus * part_digits + part_absent)[:, None], 0.0)


def surprise(algorithm, s, *, coefficient=0.5, scale=3.0):
  """A method with an auxiliary loss over the tokens of all windows."""
  del s
  loss = part(lambda logprobs: -scale * logprobs)
  term = Auxiliary(loss, coefficient, "unwindowed_policy_mask", "token-mean")
  return algorithm.change(auxiliary={"surprise": term})


def sgd(schedule, *, b1):
  """An optimizer with a setting of the config."""
  return optax.sgd(schedule, momentum=b1)


def right_and_digits(response, answer):
  """A reward with two parts."""
  return {"right": float(answer in response), "digits": len(response) / 10}


@pytest.fixture
def own(registries):  # noqa: F811
  """Registers the parts above."""
  register.reward("digits", right_and_digits)
  register.estimator("by_digits", by_digits)
  register.method("surprise", surprise)
  register.optimizer("sgd", sgd)


def make_config(model, **changes):
  """Makes a config without a critic and with one full-batch update per step."""
  given = {
    "loss__nll_coefficient": 0.0,
    "value__pretrain_steps": 0,
    "run__samples_every": 0,
    "optimizer__policy__mini_batch": 32,
  }
  return tiny_run.make_config(model, **given | changes)


@pytest.mark.usefixtures("registries")
class TestProbe:
  """Tests of a member by POISE's probe."""

  @pytest.fixture(autouse=True)
  def less_than_probed(self):
    def less_than_probed(outcomes, poise_values, mask):
      return jnp.where(mask, outcomes[:, None] - poise_values, 0.0)

    def probed(algorithm, s):
      advantages = part(less_than_probed)
      with_probe = poise.with_probe(algorithm)
      return with_probe.change(advantages=advantages, critic=None)

    register.method("probed", probed)

  def test_is_trained_beside_the_policy(self, model):
    run = build.make_run(make_config(model, method__use=("probed",)))
    assert list(run.learner.members) == ["policy", "poise"]
    states, responses = recipes.collect(run)
    learner, mask = states.learner, responses.rollout.mask
    before = jax.device_get(learner.policy.trained)
    scored, rows, timer = [], [], metrics.PhaseTimer()
    for _ in range(2):
      learner, row = run.learner.update(
        learner, responses, timer, scored.append
      )
      rows.append(row)
    # It starts at zero: its first loss is the mean squared reward. The second
    # update reads scores of the probe after the first update.
    probed = [np.asarray(x.scores["poise_values"])[mask] for x in scored]
    assert not probed[0].any() and np.abs(probed[1]).max() > 0.002
    np.testing.assert_allclose(
      rows[0]["poise/loss"], np.mean(responses.rewards**2), rtol=1e-5
    )
    assert rows[1]["poise/loss"] < rows[0]["poise/loss"]
    outcomes = np.broadcast_to(responses.rewards[:, None], mask.shape)[mask]
    for row, values in zip(rows, probed):
      np.testing.assert_allclose(
        row["advantage/mean"], (outcomes - values).mean(), rtol=1e-4
      )
    assert "time/update_poise_s" in timer.collect()
    moved = jax.tree.map(np.subtract, before, learner.policy.trained)
    assert optax.global_norm(moved) > 0
    assert learner.models["poise"].optimizer.step == 2

  def test_another_method_does_not_have_it(self):
    assert not make_algorithm(estimator__name="group").members
    made = make_algorithm(method__use=("probed",))
    assert made.members["poise"].reads == ("outcomes",)
    assert {"poise_values", "rewards"} <= made.leaves

  @pytest.mark.parametrize("name", ["policy", "critic", "poise"])
  def test_another_model_of_its_name_is_refused(self, name):
    made = make_algorithm(method__use=("probed",))
    member = MemberSpec(poise.make_probe, ("outcomes",))
    with pytest.raises(InputError, match=f"there is a '{name}' already; use"):
      made.change(members={name: member})

  def test_what_is_needed_and_not_there_is_refused(self):
    def own(algorithm, s):
      given = providers.provider("far", providers.of_member("prob"), "prob")
      advantages = part(lambda far, mask: far)
      return algorithm.change(advantages=advantages, providers=given)

    register.method("own", own)
    said = "use=.'own',.: this part reads 'far', .* .it needs 'prob'"
    with pytest.raises(InputError, match=said):
      make_algorithm(method__use=("own",))


@pytest.mark.usefixtures("registries")
class TestParts:
  OWN = {
    "reward__name": "digits",
    "estimator__name": "by_digits",
    "method__use": ("surprise",),
    "estimator__settings": {"bonus": 2.0},
    "optimizer__policy__name": "sgd",
  }

  @pytest.mark.usefixtures("own")
  def test_all_of_them_train(self, model):
    run = build.make_run(
      make_config(model, **self.OWN, optimizer__policy__learning_rate=0.5)
    )
    states, responses = recipes.collect(run)
    learner, before = states.learner, jax.device_get(states.learner.policy)
    mask = responses.rollout.mask
    learner, row = recipes.update(run, learner, responses)
    after = jax.device_get(learner.policy)
    digits = named_parts(responses, ["digits"])["digits"]
    assert np.ptp(digits) > 0
    credit = 2.0 * np.broadcast_to(digits[:, None], mask.shape)[mask]
    np.testing.assert_allclose(row["advantage/mean"], credit.mean(), rtol=1e-5)
    said = responses.rollout.behavior_logprobs[mask]
    np.testing.assert_allclose(
      row["policy/surprise_loss"], -0.5 * 3.0 * said.mean(), rtol=1e-4
    )
    # The norm of SGD's first step, whose gradient is clipped.
    settings = run.learner.policy.settings
    length = min(row["policy/grad_norm"], settings.max_grad_norm)
    moved = jax.tree.map(np.subtract, before.trained, after.trained)
    np.testing.assert_allclose(
      optax.global_norm(moved), row["policy/lr"] * length, rtol=1e-3
    )
    assert row["policy/skipped"] == 0

  def test_a_part_that_is_missing_is_zero(self):
    rows = tiny_run.random_rollout(np.random.default_rng(0), rows=3)
    responses = Responses(
      rollout=rows,
      rewards=np.ones(3, np.float32),
      correct=np.ones(3, bool),
      judged=np.ones(3, bool),
      parts={"a": np.float32([1, np.nan, 3])},
    )
    given = providers.of_responses(
      responses,
      4,
      ["part_a", "part_b", "column_c", "status", "update_version", "values"],
      lambda name, ids: np.float32([name == "c"]) * ids,
    )
    np.testing.assert_array_equal(given["column_c"], rows.example_id)
    np.testing.assert_array_equal(given["part_a"], [1, 0, 3])
    np.testing.assert_array_equal(given["part_b"], [0, 0, 0])
    assert given["status"] is rows.status and given["update_version"] == 4
    assert "values" not in given

  @pytest.mark.usefixtures("own")
  def test_parts_of_a_batch_that_waits_are_resumed(self, model, tmp_path):
    given = self.OWN | {"schedule__lag": 1, "eval__every": 2, "run__steps": 4}
    run = build.make_run(make_config(model, **given))
    rows = tiny_run.check_resumes(run, tmp_path)
    assert rows[3]["advantage/mean"] > 0

  @pytest.mark.usefixtures("own")
  @pytest.mark.parametrize(
    ("key", "value", "said"),
    [
      ("estimator__settings", {"bonos": 1.0}, "no chosen part .* 'bonos'"),
      ("estimator__settings", {"gamma": 1.0}, "set config.estimator.gamma"),
      ("loss__settings", {"x": 2}, "no chosen part .* 'x'"),
      # Its mask has a different number of tokens.
      ("schedule__streaming", True, ".'surprise',.: needs the whole batch"),
    ],
  )
  def test_a_setting_that_no_part_reads_is_refused(
    self, model, key, value, said
  ):
    with pytest.raises(InputError, match=said) as caught:
      build.make_run(make_config(model, **self.OWN | {key: value}))
    assert "\n" not in str(caught.value)

  def test_inputs_of_other_types_are_lowered_and_trained(self, model):
    register.token_input("short", lambda lengths: lengths < 5)

    def long(algorithm, s):
      loss = part(lambda short, update_version: update_version | ~short)
      term = Auxiliary(loss, 1.0, "policy_mask", "token-mean")
      return algorithm.change(auxiliary={"long": term})

    register.method("long", long)
    run = build.make_run(make_config(model, method__use=("long",)))
    lower(run.learner)
    states, responses = recipes.collect(run)
    _, row = recipes.update(run, states.learner, responses)
    lengths, mask = responses.rollout.lengths, responses.rollout.mask
    expected = mask[lengths >= 5].sum() / mask.sum()
    np.testing.assert_allclose(row["policy/long_loss"], expected, rtol=1e-5)
