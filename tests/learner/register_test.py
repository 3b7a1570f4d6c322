"""User-defined parts: an estimator, a policy loss and an input of it."""

import functools
import inspect
import re

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import recipes, tiny_run
from helpers.registries import registries  # noqa: F401
from helpers.tiny_algorithm import call, make_algorithm, policy_batch

from jaxrl_llm import losses, register, rewards
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.parts import Auxiliary, part
from jaxrl_llm.trainer.validation import validate

# Mini-batch settings for groups of one response.
_ONE = {f"optimizer__{role}__mini_batch": 8 for role in ("policy", "value")}


def to_come(tokens, lengths):
  """A custom input: the remaining fraction of a response, [B, T]."""
  return 1.0 - jnp.arange(tokens.shape[1])[None] / lengths[:, None]


def early(logprobs, proximal_logprobs, advantages, to_come, *, clip_low):
  """A custom loss that reads it: early tokens have larger weights."""
  return losses.clipped_policy_loss(
    logprobs,
    proximal_logprobs,
    to_come * advantages,
    clip_low=clip_low,
    clip_high=float("inf"),
  )


def adds(name, fn, **over):
  """Returns a method with an auxiliary loss."""
  over = {"mask": "policy_mask", "mode": "token-mean"} | over
  term = Auxiliary(part(fn), 0.5, **over)
  return lambda algorithm, s: algorithm.change(auxiliary={name: term})


@pytest.mark.usefixtures("registries")
class TestRegister:
  def test_an_own_loss_reads_an_own_input(self, model):
    register.token_input("to_come", to_come)
    register.loss("early", early)
    run = tiny_run.make_run(
      model,
      loss__nll_coefficient=0.0,
      method__use=("reinforce_pp",),
      estimator__center="none",
      estimator__normalize="none",
      loss__name="early",
      # One update, so that its loss is that of the sampling policy.
      optimizer__policy__mini_batch=32,
    )
    assert {"tokens", "lengths"} <= run.learner.algorithm.leaves
    states, responses = recipes.collect(run)
    _, row = recipes.update(run, states.learner, responses)
    # Every token has its response's reward and ratio 1.
    lengths, mask = responses.rollout.lengths, responses.rollout.mask
    share = 1 - np.arange(mask.shape[1]) / lengths[:, None]
    credit = np.broadcast_to(responses.rewards[:, None], mask.shape)
    assert np.ptp(responses.rewards) > 0 and np.ptp(lengths) > 0
    expected = -(share * credit)[mask].mean()
    assert abs(expected + credit[mask].mean()) > 0.01
    np.testing.assert_allclose(row["policy/loss"], expected, rtol=1e-4)
    assert row["policy/grad_norm"] > 0 and row["policy/skipped"] == 0

  def test_an_own_template(self, model):
    register.template(
      "twice",
      lambda tokenizer: lambda example: tokenizer.encode(example.question) * 2,
    )
    longer = {"data__template": "twice", "data__max_prompt_length": 24}
    run = tiny_run.make_run(model, **longer)
    prompts, _ = run.source.draw(run.source.init(), 3)
    assert all(p.text == 2 * p.question for p in prompts)

  def test_with_a_critic(self):
    register.estimator(
      "less_value", lambda token_rewards, values: token_rewards - values
    )
    made = make_algorithm(estimator__name="less_value")
    assert made.value_loss is not None and "returns" in made.experience
    # It is possible because windowed runs have a critic.
    changes = {"estimator__name": "less_value", "schedule__window": 3}
    validate(tiny_run.make_config("none", **changes))

  @pytest.mark.parametrize(
    ("add", "names", "said"),
    [
      (register.estimator, "gae", "'{}' already exists; use another name"),
      (register.loss, "clip", "'{}' already exists; use another name"),
      (register.optimizer, "adamw", "'{}' already exists; use another name"),
      (register.method, "gspo sapo", "'{}' already exists; use another name"),
      (
        register.token_input,
        "values shaped_rewards part_a column_a policy_mask rewards weights",
        "an input '{}' already exists; use another name",
      ),
    ],
  )
  def test_a_taken_name_is_refused(self, add, names, said):
    for name in names.split():
      with pytest.raises(ValueError, match=said.format(name)):
        add(name, lambda mask: mask)

  def test_a_part_of_ones_own_is_replaced(self):
    """This is needed when a notebook cell is edited and run again."""
    register.reward("mine", lambda response: 0.0)
    register.reward("mine", lambda response: 1.0)
    assert rewards.REWARDS["mine"]("") == 1.0
    register.token_input("mine", lambda lengths: lengths)
    register.token_input("mine", lambda lengths: 2 * lengths)
    assert make_algorithm().parts["mine"]({"lengths": 3}) == 6

  @pytest.mark.parametrize(
    ("group", "add", "own", "meant"),
    [
      ("estimator", register.estimator, lambda mask, *, gama=1: 0, "gamma"),
      (
        "estimator",
        register.mask,
        lambda mask, *, tail_drops=1: 0,
        "tail_drop",
      ),
      ("estimator", register.token_input, lambda x, *, gama=1: 0, "gamma"),
      ("loss", register.loss, lambda mask, *, clip_hihg=1: 0, "clip_high"),
      ("optimizer.policy", register.optimizer, lambda x, *, b_1: 0, "b1"),
    ],
  )
  def test_a_misspelt_setting_is_refused(self, group, add, own, meant):
    (wrong,) = inspect.getfullargspec(own).kwonlyargs
    said = f"config.{group}.* has no setting '{wrong}'; use '{meant}', or bind"
    with pytest.raises(ValueError, match=said):
      add("own", own)
    add("own", functools.partial(own, **{wrong: 0.5}))

  def test_an_argument_reads_an_input_of_another_name(self):
    register.loss("own", losses.gspo_loss, old_logprobs="behavior_logprobs")
    register.estimator("own", lambda x: x, x="token_rewards")
    made = make_algorithm(loss__name="own", estimator__name="own")
    assert made.policy_loss.reads[:2] == ("logprobs", "behavior_logprobs")
    assert made.parts["advantages"].reads[0] == "token_rewards"

  def test_an_own_input_has_settings_of_the_loss_and_the_estimator(self):
    def own(rewards, *, gamma, clip_high):
      return rewards * gamma + clip_high

    register.token_input("to_come", own)
    made = make_algorithm(estimator__gamma=0.5, loss__clip_high=0.25)
    got = made.parts["to_come"]({"rewards": jnp.ones(2)})
    np.testing.assert_array_equal(got, [0.75, 0.75])
    with pytest.raises(ValueError, match="custom setting 'own' a default"):
      register.token_input("own", lambda mask, *, own: mask)

  def test_an_own_input_is_no_weight_of_a_loss(self):
    register.token_input("nll_weights", lambda rewards: 5.0 * rewards)
    register.loss("own", lambda logprobs, rewards, nll_weights: logprobs)
    batch = policy_batch(make_algorithm(loss__name="own"))
    # Inputs of responses are read at every token.
    given = np.abs(batch.inputs["nll_weights"]), np.abs(batch.inputs["rewards"])
    assert np.unique(given[0]).tolist() == [0, 5] and batch.trains
    np.testing.assert_array_equal(given[0], 5 * given[1])
    nothing = {k: 0 * batch.inputs[k] for k in ("weights", "nll/weights")}
    assert not batch.replace(inputs=batch.inputs | nothing).trains

  @pytest.mark.parametrize(
    ("own", "shape"),
    [
      (lambda rewards: rewards > 0, r"\(\d+,\)"),
      (lambda rewards: rewards[:, None] > 0, r"\(\d+, 1\)"),
      (lambda rewards: list(rewards > 0), "list"),
    ],
  )
  def test_results_that_are_not_per_token_are_refused(self, own, shape):
    register.estimator("own", own)
    register.mask("own", lambda mask, rewards: own(rewards))
    for key, name in (("estimator__name", "own"), ("loss__masks", ("own",))):
      made = make_algorithm(**{"estimator__name": "group", key: name})
      said = f"config.{key.replace('__', '.')}: .* {shape}, not an array"
      with pytest.raises(InputError, match=said):
        policy_batch(made)

  def test_a_mask_only_leaves_out_tokens(self):
    """A mask that counts padding would lower the loss of every token."""
    register.mask("own", lambda mask, behavior_logprobs: behavior_logprobs > -5)
    register.mask("soft", lambda mask: 0.5 * mask)
    given = {
      "trainable": jnp.array([[True, True, False]]),
      "behavior_logprobs": jnp.array([[-9.0, -1.0, 0.0]]),
    }
    made = make_algorithm(loss__masks=("own",)).parts["unwindowed_policy_mask"]
    np.testing.assert_array_equal(call(made, given), [[False, True, False]])
    made = make_algorithm(loss__masks=("soft",)).parts["unwindowed_policy_mask"]
    with pytest.raises(InputError, match="loss.masks: .* float32, not bool"):
      call(made, given)
    with pytest.raises(ValueError, match="first argument must be `mask`"):
      register.mask("other", lambda rewards, mask: mask & (rewards > 0))

  @pytest.mark.parametrize(
    ("mode", "said"),
    [("dr-grpo", "norm=None with mode='dr-grpo': norm is"), ("mean", "one of")],
  )
  def test_a_mode_that_there_is_not_is_refused(self, mode, said):
    register.method("own", adds("own", lambda logprobs: logprobs, mode=mode))
    with pytest.raises(InputError, match=f"auxiliary loss 'own': .*{said}"):
      make_algorithm(method__use=("own",))

  @pytest.mark.parametrize("how", ["plain", "reduced", "auxiliary"])
  def test_a_loss_that_is_not_per_token_is_refused(self, model, how):
    def own(logprobs, proximal_logprobs, advantages):
      clip = {"clip_low": 0.2, "clip_high": 0.2}
      found = losses.clipped_policy_loss(
        logprobs, proximal_logprobs, advantages, **clip
      )
      whole = found._replace(loss=found.loss.sum())
      return {"plain": found.loss, "reduced": whole, "auxiliary": found}[how]

    register.loss("own", own)
    register.method("own", adds("own", lambda logprobs: logprobs.sum()))
    aux = {"method__use": ("own",)} if how == "auxiliary" else {}
    run = tiny_run.make_run(model, loss__name="own", **aux)
    states, responses = recipes.collect(run)
    key, has = (
      "auxiliary loss 'own'" if aux else "policy loss",
      r"shape \(\), not",
    )
    has = "no field `loss`" if how == "plain" else has
    with pytest.raises(InputError, match=f"{key}: .* has {has}"):
      recipes.update(run, states.learner, responses)

  def test_an_input_that_nothing_gives_is_refused(self):
    register.estimator("own", lambda token_rewards, tokenz: token_rewards)
    register.loss("own", lambda logprobs, values: logprobs)
    register.mask("own", lambda mask, tokenz: mask)
    for key, name, lacks in (
      ("estimator__name", "own", "tokenz"),
      ("loss__masks", ("own",), "tokenz"),
      ("loss__name", "own", "values"),
    ):
      changes = {"estimator__name": "group", key: name}
      said = (
        f"config.{key.replace('__', '.')}={name!r}: this part reads {lacks!r}"
      )
      with pytest.raises(InputError, match=re.escape(said)) as caught:
        make_algorithm(**changes)
      assert "\n" not in str(caught.value)
    make_algorithm(loss__name="own")  # With a critic, there are values.
    register.method("far", adds("far", lambda logprobs, tokenz: logprobs))
    said = "auxiliary loss 'far': this part reads 'tokenz', .*mean 'tokens'"
    with pytest.raises(InputError, match=said):
      make_algorithm(estimator__name="group", method__use=("far",))

  def test_an_own_metric(self, model):
    register.token_input("to_come", to_come)

    def late(to_come, values, policy_mask, *, base=2.0):
      return base * jnp.sum(jnp.where(policy_mask, to_come + values, 0.0))

    def measured(algorithm, s, *, fn=late):
      best = part(lambda x: x.max(), x="rewards")
      return algorithm.change(metrics={"late": part(fn), "best": best})

    register.method("measured", measured)
    use = {"method__use": ("measured",)}
    run = tiny_run.make_run(model, **use)
    states, responses = recipes.collect(run)
    batches = []
    _, row = recipes.update(run, states.learner, responses, batches.append)
    assert row["own/best"] == responses.rewards.max()
    seen = batches[0].experience
    expected = 2 * (seen["to_come"] + seen["values"])[seen["policy_mask"]].sum()
    np.testing.assert_allclose(row["own/late"], expected, rtol=1e-4)
    with pytest.raises(InputError, match="metric 'late': this part reads 'val"):
      make_algorithm(estimator__name="group", **use)
    first = lambda policy_mask: policy_mask[0]
    register.method("measured", functools.partial(measured, fn=first))
    run = tiny_run.make_run(model, **use)
    states, responses = recipes.collect(run)
    with pytest.raises(InputError, match="metric 'late' returned shape"):
      recipes.update(run, states.learner, responses)

  def test_what_compares_groups_does_not_stream(self):
    register.token_input("of_prompt", lambda example_id: example_id)
    register.estimator("own", lambda mask, of_prompt: mask * of_prompt)
    changes = {f"optimizer__{x}__mini_batch": 32 for x in ("policy", "value")}
    config = tiny_run.make_config(
      "none",
      estimator__name="own",
      schedule__streaming=True,
      value__pretrain_steps=0,
      loss__nll_coefficient=0.0,
      **changes,
    )
    with pytest.raises(InputError, match="streaming=True with .*'own': needs"):
      validate(config)
    config.estimator.name = "gae"
    validate(config)

  @pytest.mark.parametrize(
    ("changes", "said"),
    [
      ({"data__group_size": 1, **_ONE}, "group baseline"),
      ({"estimator__gamma": 0.9}, "no discount"),
      ({"loss__dual_clip": 3.0}, "no dual clip"),
      ({"reward__overlong_buffer": 4}, "does not read the reward"),
    ],
  )
  def test_settings_without_an_effect_are_refused(self, changes, said):
    register.estimator("own", lambda mask, groups: mask * groups[:, None])
    register.loss("own", lambda logprobs, advantages: -advantages * logprobs)
    own = {"estimator__name": "own", "loss__name": "own"}
    own |= {"value__pretrain_steps": 0}
    validate(tiny_run.make_config("none", **own))
    with pytest.raises(InputError, match=said):
      validate(tiny_run.make_config("none", **own, **changes))

  @pytest.mark.parametrize(
    ("name", "method"),
    [("entropy_code", "hapo"), ("writer_logprobs", "kept_weights")],
  )
  def test_an_input_of_a_method_is_known_once_it_is_chosen(self, name, method):
    register.token_input(name, to_come)
    make_algorithm(schedule__lag=1)
    with pytest.raises(
      InputError, match=f"there is a token input '{name}' alr"
    ):
      make_algorithm(schedule__lag=1, method__use=(method,))
