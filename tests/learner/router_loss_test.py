"""Router losses and metrics are weighted by tokens and equal on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_experts, tiny_run, tiny_update

from jaxrl_llm import models, sharding
from jaxrl_llm.learner import packing, update
from jaxrl_llm.learner.optimizer import create_train_state

CONFIG = dataclasses.replace(
  tiny_run.model_config(),
  family="qwen3_moe",
  extra=tuple(tiny_experts.EXTRA.items()),
)
MESHES = {
  "plain": {"data": 2, "fsdp": 2, "tensor": 2},
  "folded": {"data": 1, "fsdp": 4, "tensor": 2, "expert": 4},
}


def updated(batch, mesh=None):
  """Returns metrics and parameter changes of one critic update."""
  settings, pinned = {}, {}
  fns = models.make_value(CONFIG)
  state = create_train_state(
    jax.jit(fns.init)(jax.random.key(0)), tiny_update.SGD
  )
  if mesh is not None:
    settings["sharding"] = sharding.packed_kv_sharding(
      mesh, CONFIG.num_kv_heads
    )
    fns = models.make_value(CONFIG, **settings)
    places = sharding.tree_shardings(state, mesh)
    pinned["out_shardings"] = places, sharding.replicated(mesh)
    state, batch = jax.device_put(state, places), packing.place(batch, mesh)
  objective = update.value_objective(
    fns, tiny_update.ALGORITHMS["policy"].value_loss
  )
  before = jax.device_get(state.trained)
  step = update.make_update(
    objective, tiny_update.SGD, tiny_update.RATE, **pinned
  )
  after, metrics = step(jax.tree.map(jnp.copy, state), batch)
  change = jax.tree.map(np.subtract, before, jax.device_get(after.trained))
  return jax.device_get(metrics), change


def test_micro_batches_count_by_their_tokens():
  batch = tiny_update.make_batch("value", micro_batch_size=4)
  metrics, _ = updated(batch)
  fns = models.make_value(CONFIG)
  params = jax.jit(fns.init)(jax.random.key(0))
  balance, load, tokens = [], [], []
  for i in range(int(batch.packed.count)):
    _, aux = jax.jit(fns.outputs)(params, batch.packed.rows(i))
    mask = np.asarray(batch.packed.mask[i])
    balance.append(np.mean(aux["balance"][mask]))
    load.append(np.mean(aux["metrics/expert_load"][mask]))
    tokens.append(mask.sum())
  assert len(set(tokens)) > 1
  mean = lambda x: np.average(x, weights=tokens)
  np.testing.assert_allclose(
    metrics["value/balance_loss"], mean(balance), rtol=1e-5
  )
  np.testing.assert_allclose(
    metrics["value/expert_load"], mean(load), rtol=1e-5
  )


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_a_mesh_counts_the_load_of_all_its_devices(axes):
  batch = tiny_update.make_batch("value", micro_batch_size=8)
  metrics, change = updated(batch)
  found, found_change = updated(batch, sharding.make_mesh(**axes))
  for name in ("value/balance_loss", "value/expert_load", "value/loss"):
    np.testing.assert_allclose(found[name], metrics[name], rtol=1e-5)
  close = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5)
  jax.tree.map(close, found_change, change)
