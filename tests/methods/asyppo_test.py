"""AsyPPO: two critics on halves of the prompts."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_run, tiny_update
from helpers.tiny_algorithm import make_algorithm

from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.optimizer import (
  create_train_state,
  independent,
  make_optimizer,
)
from jaxrl_llm.learner.update import make_update, value_objective
from jaxrl_llm.methods import asyppo
from jaxrl_llm.trainer import validation

_ON = {"method__use": ("asyppo",), "method__asyppo__agree_share": 0.25}
_BINS = {"method__use": ("hl_gauss",)}


def _make_params(fns):
  rng = np.random.default_rng(1)
  draw = lambda x: rng.normal(scale=0.2, size=x.shape).astype(np.float32)
  return jax.tree.map(draw, jax.eval_shape(fns.init, jax.random.key(0)))


def _micro():
  packed = tiny_update.make_batch("value", micro_batch_size=4).packed
  return jax.tree.map(jnp.asarray, packed.rows(0))


def test_values_are_the_mean_and_the_spread_of_two_critics():
  fns = tiny_update.make_fns("value")
  both = asyppo.make(fns)
  params, rows = _make_params(both), _micro()
  out, _ = jax.jit(both.outputs)(params, rows)
  first, second = (
    np.asarray(jax.jit(fns.outputs)(params[name], rows)[0]["values"])
    for name in asyppo.NAMES
  )
  np.testing.assert_allclose(out["values"], (first + second) / 2, atol=1e-5)
  expected = np.abs(first - second) / 2
  np.testing.assert_allclose(out["disagreement"], expected, atol=1e-5)
  assert expected[np.asarray(rows.segments) > 0].min() > 0


def test_a_prompt_trains_one_critic():
  made = make_algorithm(**_ON | {"method__use": ("hl_gauss", "asyppo")})
  assert {"second_half", "returns"} <= made.value_inputs
  rng, shape = np.random.default_rng(0), (3, 5)
  logits = jnp.asarray(rng.normal(size=(2, *shape, 51)), jnp.float32)
  each = {"values": logits[..., 0], "value_logits": logits}
  returns = jnp.asarray(rng.normal(size=shape), jnp.float32)
  second = jnp.asarray(rng.random(shape) < 0.5, jnp.float32)
  given = {"second_half": second, "returns": returns}
  one = make_algorithm(**_BINS).value_loss
  loss = made.value_loss(given | {"of_critics": each}).loss
  for index in (0, 1):
    own = jax.tree.map(lambda x, index=index: x[index], each)
    mine = np.asarray(second) == index
    expected = one({"returns": returns} | own).loss
    np.testing.assert_array_equal(loss[mine], expected[mine])
  gradient = jax.grad(
    lambda x: made.value_loss(given | {"of_critics": x}).loss.sum()
  )(each)
  moved = np.abs(np.asarray(gradient["value_logits"])).max(-1) > 0
  np.testing.assert_array_equal(moved[0], np.asarray(second) == 0)
  np.testing.assert_array_equal(moved[1], np.asarray(second) == 1)


def test_each_is_trained_as_if_it_were_alone():
  """Also by momentum, decay and clipping, and if its half is empty."""
  fns, made = tiny_update.make_fns("value"), make_algorithm(**_ON)
  both, one = asyppo.make(fns), make_algorithm()
  initial = _make_params(both)
  schedule = lambda step: jnp.float32(0.01)
  optimizer = make_optimizer(
    schedule, max_grad_norm=0.1, b1=0.9, b2=0.9, eps=1e-8, weight_decay=0.1
  )

  def trained(fns, loss, optimizer, params, batches):
    update = make_update(value_objective(fns, loss), optimizer, schedule)
    state = create_train_state(jax.tree.map(jnp.array, params), optimizer)
    for batch in batches:
      state, metrics = update.whole(state, batch)
      assert all(np.shape(x) == () for x in metrics.values())
    return state

  batch = tiny_update.make_batch("value")
  drawn = batch.packed.segments % 2
  batches = [
    tiny_update.with_input(batch, "second_half", np.float32(half))
    for half in (drawn, 0 * drawn, 0 * drawn, drawn, 1 + 0 * drawn)
  ]
  loss, each = made.value_loss, independent(optimizer)
  state = trained(both, loss, each, initial, batches)
  for number, name in enumerate(asyppo.NAMES):
    own = []
    for x in batches:
      mine = x.inputs["second_half"] == number
      weights = np.where(mine, x.inputs["weights"], 0)
      own.append(tiny_update.with_input(x, "weights", weights))
    own = [x for x in own if x.trains]
    assert len(own) == (4, 3)[number]
    alone = trained(fns, one.value_loss, optimizer, initial[name], own)
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-6)
    close(state.trained[name], alone.trained)
    moments, expected = state.optimizer.opt_state[name], alone.optimizer
    close(moments[1][0], expected.opt_state[1][0])


def test_halves_are_of_prompts():
  # Rows of endless data have numbers that float32 rounds to even ones.
  found = asyppo.second_half(jnp.array([4, 7, 606427005, 2**31 - 1, 2**31 - 2]))
  np.testing.assert_array_equal(found, [0, 1, 1, 1, 0])


def test_tokens_of_agreement_are_dropped_and_ties_kept():
  mask = jnp.array([[True, True, True, False], [True, True, False, False]])
  disagreement = jnp.array([[0.1, 0.5, 0.4, 0.0], [0.3, 0.2, 0.0, 0.0]])
  kept = asyppo.without_agreement(mask, disagreement, agree_share=0.4)
  # Of five tokens, 0.1 and 0.2 are removed; masked tokens do not count.
  expected = [[False, True, True, False], [True, False, False, False]]
  np.testing.assert_array_equal(kept, expected)
  equal = asyppo.without_agreement(mask, 0 * disagreement, agree_share=0.4)
  np.testing.assert_array_equal(equal, mask)


@pytest.mark.parametrize(
  "changes, problem",
  [
    (_ON | {"estimator__name": "group"}, "'asyppo' needs a critic"),
    (_ON | {"loss__clip_value": 0.2}, "not the old value of any"),
    (
      _BINS | {"loss__clip_value": 0.2},
      "a distribution over bins cannot be clipped",
    ),
    (
      _BINS | {"method__hl_gauss__high": 1.0},
      "must cover the rewards, -1 to 1",
    ),
    (
      {
        "optimizer__value__learning_rate_schedule": "linear",
        "value__pretrain_steps": 9,
        "run__steps": 8,
      },
      "the end of the learning-rate schedule after run.steps batches",
    ),
  ],
)
def test_what_does_not_go_together_is_one_line(tmp_path, changes, problem):
  config = tiny_run.make_config(tmp_path, **changes)
  with pytest.raises(InputError, match=problem):
    validation.validate(config)
