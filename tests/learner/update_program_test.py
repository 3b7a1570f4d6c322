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
  largest,
  make_batch,
  make_data,
  make_fns,
  make_params,
  make_state,
  make_update,
  objective_of,
  updated,
  with_input,
)

from jaxrl_llm import masked, models, sharding
from jaxrl_llm.learner import update
from jaxrl_llm.learner.optimizer import create_train_state
from jaxrl_llm.learner.packing import place


class TestOneProgram:
  def test_the_state_is_donated(self):
    before, batch = make_state("policy"), make_batch("policy")
    make_update("policy").whole(before, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(before.trained))

  def test_micro_batches_that_hold_nothing_are_not_run(self):
    # Arrays of others may be arbitrary: only `count` micro-batches are read.
    batch = make_batch("policy")
    assert batch.packed.count < batch.packed.tokens.shape[0]
    spoiled = batch.inputs["advantages"].copy()
    spoiled[batch.packed.count :] = np.nan
    spoiled = with_input(batch, "advantages", spoiled)
    chex.assert_trees_all_equal(
      updated("policy", batch), updated("policy", spoiled)
    )

  def test_lengths_and_temperature_compile_nothing(self):
    apply = make_update("policy").whole
    current, _ = updated("policy", make_batch("policy"))
    compiled = apply._cache_size()
    for rows, temperature in (([1] * 16, 0.5), ([*range(8), *range(8)], 1.3)):
      batch = make_batch("policy", rows=rows)
      packed = batch.packed.replace(temperature=np.float32(temperature))
      current, _ = apply(current, batch.replace(packed=packed))
    assert apply._cache_size() == compiled
    assert current.optimizer.step == 3


class TestStepScale:
  """Updates from the same state with several factors."""

  def apply(self, scale):
    batch = make_batch("policy")
    if scale is not None:
      batch = batch.replace(step_scale=np.float32(scale))
    return jax.device_get(updated("policy", batch))

  def test_scales_the_update_and_not_the_optimizer(self):
    plain, metrics = self.apply(None)
    assert "policy/step_scale" not in metrics
    one, metrics = self.apply(1.0)
    assert metrics["policy/step_scale"] == 1.0
    chex.assert_trees_all_equal(one, plain)
    compiled = make_update("policy").whole._cache_size()
    half, metrics = self.apply(0.5)
    assert make_update("policy").whole._cache_size() == compiled
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
  def test_is_skipped_and_counted(self, name, poison):
    apply, batch = make_update("policy").whole, make_batch("policy")
    where = tuple(np.argwhere(batch.packed.mask)[3])
    values = np.array(batch.inputs[name])
    values[where] = poison
    spoiled = with_input(batch, name, values)
    good, _ = updated("policy", batch)
    before = jax.device_get(good)
    bad, metrics = apply(good, spoiled)
    chex.assert_trees_all_equal(
      jax.device_get((bad.trained, bad.optimizer.opt_state)),
      (before.trained, before.optimizer.opt_state),
    )
    assert bad.optimizer[1:] == (1, 1, 1)
    assert metrics["policy/skipped"] == 1.0
    bad, _ = apply(bad, spoiled)
    assert bad.optimizer[2:] == (2, 2)
    good, metrics = apply(bad, batch)
    assert good.optimizer[1:] == (2, 2, 0)
    assert metrics["policy/skipped"] == 0.0


class TestAccumulation:
  @pytest.mark.parametrize("kind", ["gspo", "value"])
  def test_of_parts_is_the_update_on_the_whole(self, kind):
    """SGD's updates are gradients, so this compares gradients."""
    parts = make_update(kind)
    state, sums = make_state(kind), None
    for rows in (range(4), range(4, 12), range(12, SAMPLES)):
      batch = make_batch(kind, rows=rows, size=1)
      sums = parts.accumulate(sums, state.trained, batch, {})
    mask = make_data()[1][f"{'value' if kind == 'value' else 'policy'}_mask"]
    size = masked.reduction_size(mask, mode=ALGORITHMS["gspo"].mode)
    after, row = parts.apply(state, sums, size, np.int32(0))
    whole, expected = updated(kind, make_batch(kind))
    for mine, his in zip(*map(jax.tree.leaves, (after.trained, whole.trained))):
      np.testing.assert_allclose(mine, his, rtol=1e-6, atol=1e-6)
    assert row.keys() == expected.keys()
    for name in row:
      if "/gradient_" not in name:  # Noise depends on micro-batches.
        np.testing.assert_allclose(row[name], expected[name], rtol=2e-6)


def test_what_is_frozen_keeps_its_value_and_has_no_moments():
  frozen = ("embed", "layers/mlp")
  whole = make_params("policy")
  base, trained = models.partition(jax.tree.map(jnp.array, whole), frozen)
  state = create_train_state(trained, SGD)
  trace = optax.tree_utils.tree_get(state.optimizer.opt_state, "trace")
  chex.assert_trees_all_equal_structs(trace, trained)
  batch = make_batch("policy")
  after, _ = make_update("policy").whole(state, batch, base=base)
  # The base is an argument, but not donated.
  chex.assert_trees_all_equal(base, models.partition(whole, frozen).base)
  # Trained leaves change as if all were trained.
  expected = models.partition(updated("policy", batch)[0].trained, frozen)
  chex.assert_trees_all_close(
    after.trained, expected.trained, rtol=1e-6, atol=1e-7
  )


@pytest.mark.parametrize("micro_batch_size", [2, 16])
def test_an_auxiliary_loss_of_the_model_is_trained_and_logged(micro_batch_size):
  fns = make_fns("policy")

  def logprobs(params, rows, load):
    out, _ = fns.logprobs(params, rows, load)
    scale = jnp.sum(models.merge(params)["final_norm"]["scale"])
    # Padding does not count.
    return out, {"size": jnp.where(rows.segments > 0, 0.25 * scale, 7.0)}

  batch = make_batch("policy", micro_batch_size=micro_batch_size)
  # A mean over tokens; with a power of two, sums have no rounding.
  tokens = batch.packed.samples.sum()
  np.testing.assert_allclose(batch.own_weight, 1 / tokens, rtol=1e-6)
  batch, share = batch.replace(own_weight=np.float32(2**-9)), tokens / 2**9
  objective = objective_of("policy", fns._replace(logprobs=logprobs))
  apply = update.make_update(objective, SGD, RATE).whole
  after, row = apply(make_state("policy"), batch)
  # Independent of the number of micro-batches.
  scale = make_params("policy")["final_norm"]["scale"]
  np.testing.assert_allclose(
    row["policy/size_loss"], 0.25 * share * scale.sum(), rtol=1e-6
  )
  expected = updated("policy", batch)[0].trained
  expected["final_norm"]["scale"] -= np.float32(0.25 * share)
  chex.assert_trees_all_close(after.trained, expected, rtol=1e-6, atol=2e-8)
