"""Router losses and metrics are weighted by tokens and equal on any mesh."""

import chex
import jax
import numpy as np
import pytest
from helpers import tiny_experts, tiny_update

from jaxrl_llm import sharding

CONFIG = tiny_experts.RUN_CONFIG
MESHES = {
  "plain": {"data": 2, "fsdp": 2, "tensor": 2},
  "folded": {"data": 1, "fsdp": 4, "tensor": 2, "expert": 4},
}


def updated(batch, mesh=None):
  """Returns metrics and parameter changes of one critic update."""
  after, metrics = tiny_update.updated("value", batch, mesh, CONFIG)
  change = tiny_update.change_of("value", after, CONFIG)
  return jax.device_get(metrics), change


def test_micro_batches_count_by_their_tokens():
  batch = tiny_update.make_batch("value")
  metrics, _ = updated(batch)
  fns = tiny_update.make_fns("value", None, CONFIG)
  params = tiny_update.make_params("value", CONFIG)
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
  chex.assert_trees_all_close(
    found_change, change, rtol=1e-5, atol=1e-6 * tiny_update.largest(change)
  )
