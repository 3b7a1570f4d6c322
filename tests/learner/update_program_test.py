"""One program, compiled once, makes every update, even scaled or skipped."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.tiny_update import (
  ALGORITHMS,
  RATE,
  SAMPLES,
  SGD,
  TEMPERATURE,
  largest,
  make_batch,
  make_data,
  make_fns,
  make_params,
  make_state,
  make_update,
  objective_of,
  policy_objective,
  settings_of,
  with_input,
)

from jaxrl_llm import masked, models, sharding
from jaxrl_llm.learner import update
from jaxrl_llm.learner.optimizer import create_train_state
from jaxrl_llm.learner.packing import place


@pytest.fixture(scope="module")
def policy_update():
  return make_update("policy")[0]


class TestOneProgram:
  def test_the_state_is_donated(self, policy_update):
    before = make_state("policy")
    policy_update(before, make_batch("policy", micro_batch_size=4), TEMPERATURE)
    assert all(x.is_deleted() for x in jax.tree.leaves(before.trained))

  def test_micro_batches_that_hold_nothing_are_not_run(self, policy_update):
    # Arrays of others may be arbitrary: only `count` micro-batches are read.
    batch = make_batch("policy", micro_batch_size=4)
    assert batch.packed.count < batch.packed.tokens.shape[0]
    spoiled = batch.inputs["advantages"].copy()
    spoiled[batch.packed.count :] = np.nan
    outputs = [
      policy_update(make_state("policy"), b, TEMPERATURE)
      for b in (batch, with_input(batch, "advantages", spoiled))
    ]
    chex.assert_trees_all_equal(*outputs)

  def test_lengths_and_temperature_compile_nothing(self, policy_update):
    batch = make_batch("policy", micro_batch_size=4)
    current, _ = policy_update(make_state("policy"), batch, TEMPERATURE)
    compiled = policy_update.whole._cache_size()
    for rows, temperature in (([1] * 16, 0.5), ([*range(8), *range(8)], 1.3)):
      batch = make_batch("policy", micro_batch_size=4, rows=rows)
      current, _ = policy_update(current, batch, np.float32(temperature))
    assert policy_update.whole._cache_size() == compiled
    assert current.optimizer.step == 3


class TestStepScale:
  """Updates from the same state with several factors."""

  def apply(self, policy_update, scale):
    batch = make_batch("policy", micro_batch_size=4)
    if scale is not None:
      batch = batch.replace(step_scale=np.float32(scale))
    after, metrics = policy_update(make_state("policy"), batch, TEMPERATURE)
    return jax.device_get(after), metrics

  def test_scales_the_update_and_not_the_optimizer(self, policy_update):
    plain, metrics = self.apply(policy_update, None)
    assert "policy/step_scale" not in metrics
    one, metrics = self.apply(policy_update, 1.0)
    assert metrics["policy/step_scale"] == 1.0
    chex.assert_trees_all_equal(one, plain)
    compiled = policy_update.whole._cache_size()
    half, metrics = self.apply(policy_update, 0.5)
    assert policy_update.whole._cache_size() == compiled
    assert metrics["policy/step_scale"] == 0.5
    chex.assert_trees_all_equal(half.optimizer, plain.optimizer)
    before = make_params("policy")
    # Halving an update is exact; only its addition to the weights rounds.
    expected = jax.tree.map(
      lambda old, trace: old - 0.5 * trace.astype(np.float64),
      before,
      optax.tree_utils.tree_get(plain.optimizer.opt_state, "trace"),
    )
    difference = jax.tree.map(
      lambda got, want: np.abs(got - want) / np.spacing(np.abs(got)),
      half.trained,
      expected,
    )
    assert largest(difference) <= 0.5

  def test_lies_whole_on_every_device(self):
    mesh = sharding.make_mesh(data=8, fsdp=1, tensor=1)
    batch = make_batch("policy", micro_batch_size=8)
    placed = place(batch.replace(step_scale=np.float32(0.5)), mesh)
    assert placed.step_scale.sharding.is_fully_replicated
    assert place(batch, mesh).step_scale is None


class TestNotFinite:
  @pytest.mark.parametrize(
    ("name", "poison"),
    [
      ("advantages", np.nan),
      ("advantages", np.inf),
      ("proximal_logprobs", np.nan),
      ("weights", -np.inf),
    ],
  )
  def test_is_skipped_and_counted(self, policy_update, name, poison):
    batch = make_batch("policy", micro_batch_size=4)
    where = tuple(np.argwhere(batch.packed.mask)[3])
    values = np.array(batch.inputs[name])
    values[where] = poison
    spoiled = with_input(batch, name, values)
    good, _ = policy_update(make_state("policy"), batch, TEMPERATURE)
    before = jax.device_get(good)
    bad, metrics = policy_update(good, spoiled, TEMPERATURE)
    chex.assert_trees_all_equal(
      jax.device_get((bad.trained, bad.optimizer.opt_state)),
      (before.trained, before.optimizer.opt_state),
    )
    assert bad.optimizer[1:] == (1, 1, 1)
    assert metrics["policy/skipped"] == 1.0
    bad, _ = policy_update(bad, spoiled, TEMPERATURE)
    assert bad.optimizer[2:] == (2, 2)
    good, metrics = policy_update(bad, batch, TEMPERATURE)
    assert good.optimizer[1:] == (2, 2, 0)
    assert metrics["policy/skipped"] == 0.0


class TestAccumulation:
  @pytest.mark.parametrize("kind", ["gspo", "value"])
  def test_of_parts_is_the_update_on_the_whole(self, kind):
    """SGD's updates are gradients, so this compares gradients."""
    parts = update.make_update(objective_of(kind, make_fns(kind)), SGD, RATE)
    state, sums = make_state(kind), None
    for rows in (range(4), range(4, 12), range(12, SAMPLES)):
      batch = make_batch(kind, micro_batch_size=4, rows=rows, size=1)
      given = state.trained, batch, *settings_of(kind)
      sums = parts.accumulate(sums, *given)
    mask = make_data()[1][f"{'value' if kind == 'value' else 'policy'}_mask"]
    size = masked.reduction_size(mask, mode=ALGORITHMS["gspo"].loss_mode)
    after, row = parts.apply(state, sums, size, np.int32(0))
    whole, expected = make_update(kind)[0](
      make_state(kind), make_batch(kind, micro_batch_size=4), *settings_of(kind)
    )
    for mine, his in zip(*map(jax.tree.leaves, (after.trained, whole.trained))):
      np.testing.assert_allclose(mine, his, rtol=1e-6, atol=1e-6)
    assert row.keys() == expected.keys()
    for name in row:
      if "/gradient_" not in name:  # Noise depends on micro-batches.
        np.testing.assert_allclose(row[name], expected[name], rtol=2e-6)


class TestFrozen:
  def test_what_is_frozen_keeps_its_value_and_has_no_moments(self):
    frozen = ("embed", "layers/mlp")
    objective = policy_objective(make_fns("policy"))
    apply = update.make_update(objective, SGD, RATE)
    params = jax.tree.map(jnp.array, make_params("policy"))
    base, trained = models.partition(params, frozen)
    state = create_train_state(trained, SGD)
    kept = [name for name in paths(params) if any(f in name for f in frozen)]
    assert sorted(paths(base)) == sorted(kept) and kept
    assert {*paths(trained)} == {*paths(params)} - {*kept}
    moments = len(jax.tree.leaves(state.optimizer.opt_state))
    assert moments == len(jax.tree.leaves(trained))
    batch = make_batch("policy", micro_batch_size=4)
    after, _ = apply(state, batch, TEMPERATURE, base=base)
    # The base is an argument, but not donated.
    assert not any(x.is_deleted() for x in jax.tree.leaves(base))
    whole, _ = make_update("policy")[0](
      make_state("policy"), batch, TEMPERATURE
    )
    before, new, expected = map(
      paths,
      (
        make_params("policy"),
        models.merge(models.Params(base, after.trained)),
        whole.trained,
      ),
    )
    for name in before:
      # Trained leaves change as if all were trained.
      wanted = before[name] if name in kept else expected[name]
      np.testing.assert_allclose(new[name], wanted, rtol=1e-6, atol=1e-7)
      assert name in kept or not np.array_equal(new[name], before[name])


class TestAuxiliaryLossOfTheModel:
  @pytest.mark.parametrize("micro_batch_size", [2, 16])
  def test_is_trained_and_logged(self, micro_batch_size):
    fns = make_fns("policy")

    def logprobs(params, rows, temperature):
      out, _ = fns.logprobs(params, rows, temperature)
      scale = jnp.sum(models.merge(params)["final_norm"]["scale"])
      # Tokens without a weight do not count.
      return out, {"size": jnp.where(rows.mask, 0.25 * scale, 7.0)}

    batch = make_batch("policy", micro_batch_size=micro_batch_size)
    objective = policy_objective(fns._replace(logprobs=logprobs))
    apply = update.make_update(objective, SGD, RATE)
    after, row = apply(make_state("policy"), batch, TEMPERATURE)
    plain, _ = make_update("policy")[0](
      make_state("policy"), batch, TEMPERATURE
    )
    # A mean over tokens, independent of the number of micro-batches.
    scale = make_params("policy")["final_norm"]["scale"]
    np.testing.assert_allclose(
      row["policy/size_loss"], 0.25 * scale.sum(), rtol=1e-6
    )
    moved, alone = after.trained, plain.trained
    np.testing.assert_allclose(
      moved["final_norm"]["scale"],
      alone["final_norm"]["scale"] - 0.25,
      rtol=1e-5,
    )
    np.testing.assert_allclose(
      moved["embed"]["embedding"],
      alone["embed"]["embedding"],
      rtol=1e-6,
      atol=2e-8,  # Two roundings of the largest.
    )


def paths(tree):
  """Returns arrays by their paths 'a/b/c'."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {"/".join(k.key for k in path): np.asarray(x) for path, x in leaves}
