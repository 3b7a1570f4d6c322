"""A model's own loss is that of `transformers` over the mini-batch."""

import functools
import tempfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_experts, tiny_run, tiny_update
from helpers.tiny_algorithm import make_algorithm, pack_policy

from jaxrl_llm import masked, models, sharding
from jaxrl_llm.learner import packing
from jaxrl_llm.methods import asyppo
from jaxrl_llm.types import take_rows

CONFIG = tiny_experts.RUN_CONFIG
COEFFICIENT = tiny_experts.EXTRA["router_aux_loss_coef"]
MESHES = {
  "plain": {"data": 2, "fsdp": 2, "tensor": 2},
  "folded": {"data": 1, "fsdp": 4, "tensor": 2, "expert": 4},
}


def updated(batch, mesh=None, kind="value"):
  """Returns metrics and parameter changes of one update."""
  after, metrics = tiny_update.updated(kind, batch, mesh, CONFIG)
  change = tiny_update.change_of(kind, after, CONFIG)
  return jax.device_get(metrics), change


@functools.cache
def of_transformers(kind):
  """Computes the loss and its gradients, one sample per row.

  Returns:
    The loss times its coefficient, and the gradients of the routers, [L, D, E],
    and of the embedding, [V, D].
  """
  reason = "the reference is only in the `convert` extra"
  torch = pytest.importorskip("torch", reason=reason)
  transformers = pytest.importorskip("transformers", reason=reason)
  params = dict(tiny_update.make_params(kind, CONFIG))
  params.pop("value_head", None)
  with tempfile.TemporaryDirectory() as folder:
    models.save(folder, models.make_policy(CONFIG, head_chunk=8), params)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder)
  tokens, present, _ = tiny_run.padded(tiny_update.make_data()[0])
  given = {"input_ids": tokens, "attention_mask": present}
  given = {name: torch.tensor(x.astype(np.int64)) for name, x in given.items()}
  loss = COEFFICIENT * model(**given, output_router_logits=True).aux_loss
  loss.backward()
  routers = [x.mlp.gate.weight.grad.numpy().T for x in model.model.layers]
  embedding = model.model.embed_tokens.weight.grad.numpy()
  return float(loss.detach()), np.stack(routers), embedding


def alone(batch):
  """Returns a batch in which no token has a weight in another loss."""
  inputs = {
    name: 0 * x if name.endswith("weights") else x
    for name, x in batch.inputs.items()
  }
  return batch.replace(inputs=inputs)


@pytest.mark.parametrize(
  ("kind", "packed"),
  [
    ("policy", {"micro_batch_size": 4}),
    ("policy", {"micro_batch_size": 16}),
    ("policy", {"micro_batch_size": 16, "share": False}),
    ("value", {"micro_batch_size": 4}),
  ],
)
def test_is_that_of_transformers_however_samples_are_packed(kind, packed):
  batch = tiny_update.make_batch(kind, **packed)
  loss, routers, embedding = of_transformers(kind)
  metrics, change = updated(alone(batch), kind=kind)
  name = f"{kind}/balance_loss"
  np.testing.assert_allclose(metrics[name], loss, rtol=1e-5)
  router = change["layers"]["mlp"]["router"]["kernel"]
  np.testing.assert_allclose(router, routers, rtol=1e-4, atol=1e-6)
  found = change["embed"]["embedding"]
  np.testing.assert_allclose(found, embedding, rtol=1e-4, atol=1e-6)
  # Other losses do not change it.
  metrics, _ = updated(batch, kind=kind)
  np.testing.assert_allclose(metrics[name], loss, rtol=1e-5)


@pytest.mark.parametrize("mode", masked.MODES)
def test_no_mode_mask_or_correction_changes_its_weight(mode):
  """Weights of tokens sum to 1 over a mini-batch, also over its parts."""
  rollout, data = tiny_update.make_data()
  made = make_algorithm(loss__mode=mode, off_policy__correction="truncate")
  data |= {"old_logprobs": rollout.behavior_logprobs - 1}
  data |= {"behavior_logprobs": rollout.behavior_logprobs}

  def weight(rows, size=None):
    layout = packing.make_layout(
      take_rows(rollout, rows), capacity=24, rows=4, micro_batches=4
    )
    share = 1 if size is None else len(rows) / tiny_update.SAMPLES
    batch = packing.MiniBatch(rows, layout, rollout, share)
    inputs = take_rows(data, rows)
    packed = pack_policy(inputs, batch, made, size)
    tokens = int((rollout.lengths + rollout.prompt_lengths)[rows].sum())
    assert packed.packed.samples.sum() == tokens
    return packed.own_weight * tokens

  every = np.arange(tiny_update.SAMPLES)
  np.testing.assert_allclose(weight(every), 1, rtol=1e-6)
  size = masked.reduction_size(data["policy_mask"], mode=mode)
  parts = [weight(x, 1) for x in np.split(every, [4, 12])]
  np.testing.assert_allclose(sum(parts) / size, 1, rtol=1e-6)


def test_each_critic_of_an_ensemble_has_its_own():
  fns = tiny_update.make_fns("value", None, CONFIG)
  both = asyppo.make(fns)
  params = tiny_update.make_params("value", CONFIG)
  other = jax.tree.map(lambda x: 0.5 * x, params)
  rows = tiny_experts.rows()
  rows = rows.replace(tokens=rows.tokens % 19, samples=rows.segments)

  balance = lambda fns, params: jax.jit(
    lambda x: jnp.sum(
      fns.outputs(x, rows, fns.load(x, rows))[1]["balance"] * rows.samples
    )
  )(params)
  each = balance(fns, params), balance(fns, other)
  assert abs(each[0] / each[1] - 1) > 1e-3
  together = balance(both, dict(zip(asyppo.NAMES, (params, other))))
  np.testing.assert_allclose(together, sum(each), rtol=1e-6)


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
