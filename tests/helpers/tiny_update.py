"""One small mini-batch and its updates, shared by tests of the update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import tiny_run
from helpers.tiny_algorithm import pack_critic, pack_policy

from jaxrl_llm import losses, models, sharding
from jaxrl_llm.learner import packing, update
from jaxrl_llm.learner.core import make_algorithm
from jaxrl_llm.learner.optimizer import create_train_state
from jaxrl_llm.types import take_rows

SAMPLES, PROMPT, ROOM = 16, 7, 9
CAPACITY = 24  # Some samples share their prompt, others do not.
CONFIG = tiny_run.model_config()
TEMPERATURE = np.float32(0.8)
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
POLICY_LOSS = functools.partial(losses.clipped_policy_loss, **CLIPS)
RATE = lambda step: 1e-2 + 0.0 * step
# The first update of the parameters equals the gradient, but there is an
# optimizer state.
SGD = optax.sgd(1.0, momentum=0.9)


@functools.cache
def make_fns(kind, mesh=None, config=CONFIG):
  settings = {}
  if mesh:
    settings["sharding"] = sharding.packed_kv_sharding(
      mesh, config.num_kv_heads
    )
  if kind == "value":
    return models.make_value(config, **settings)
  if mesh:
    settings["head_sharding"] = sharding.head_sharding(mesh, config.vocab_size)
  return models.make_policy(config, head_chunk=8, **settings)


@functools.cache
def make_params(kind, config=CONFIG):
  """Makes random weights on the host, with gradients of all sizes."""
  params = jax.eval_shape(make_fns(kind, None, config).init, jax.random.key(0))
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(1)
  draw = lambda x: rng.normal(scale=0.2, size=x.shape).astype(np.float32)
  return jax.tree.unflatten(tree, [draw(x) for x in leaves])


@functools.cache
def make_data():
  """Makes a rollout and the inputs of the losses, unpacked."""
  rng = np.random.default_rng(7)
  rollout = tiny_run.random_rollout(
    rng, rows=SAMPLES, prompt=PROMPT, room=ROOM, vocab=19, group_size=4
  )
  mask = rollout.mask
  normal = lambda: rng.normal(size=mask.shape).astype(np.float32)
  policy_mask = mask & (np.arange(SAMPLES) != 3)[:, None]
  data = {
    # Far enough from the policy for clipping on both sides.
    "proximal_logprobs": -3.0 + 0.5 * normal(),
    "advantages": np.where(mask, normal(), 0),
    "old_values": normal(),
    "returns": normal(),
    "policy_mask": policy_mask,
    "value_mask": policy_mask,
    "positive_mask": policy_mask & (np.arange(SAMPLES) % 3 == 0)[:, None],
    "ref_logprobs": -3.0 + 0.5 * normal(),
  }
  return rollout, data


# Clip bounds much wider than the paper's, so that some responses are inside.
GSPO = {"clip_low": 0.05, "clip_high": 0.3}
ALGORITHMS = {
  "policy": make_algorithm(tiny_run.make_config("none")),
  "gspo": make_algorithm(
    tiny_run.make_config(
      "none",
      method__use=("gspo",),
      **{f"loss__{name}": bound for name, bound in GSPO.items()},
      loss__nll_coefficient=0.0,
      loss__kl="k2",
      loss__kl_coefficient=0.3,
      loss__entropy_coefficient=0.2,
    )
  ),
}


def make_batch(
  kind,
  *,
  micro_batch_size=4,
  rows=range(SAMPLES),
  capacity=CAPACITY,
  size=None,
  share=True,
):
  rollout, data = make_data()
  rows = np.asarray(rows)
  layout = packing.make_layout(
    take_rows(rollout, rows),
    capacity=capacity,
    rows=micro_batch_size,
    micro_batches=-(-len(rows) // micro_batch_size),
    share=share,
  )
  batch = packing.MiniBatch(rows, layout, rollout, temperature=TEMPERATURE)
  inputs = take_rows(data, rows)
  if kind == "value":
    return pack_critic(inputs, batch, ALGORITHMS["policy"], size)
  return pack_policy(inputs, batch, ALGORITHMS[kind], size)


def with_input(batch, name, values):
  """Returns the batch with one input replaced."""
  return batch.replace(inputs=batch.inputs | {name: values})


def objective_of(kind, fns):
  chosen = ALGORITHMS["policy" if kind == "value" else kind]
  if kind == "value":
    return update.value_objective(fns, chosen.value_loss)
  return update.policy_objective(fns, chosen.policy_loss, chosen.auxiliary)


def places(kind, mesh, config=CONFIG):
  """Returns the shardings of a state."""
  make = lambda: create_train_state(make_params(kind, config), SGD)
  return sharding.tree_shardings(jax.eval_shape(make), mesh)


def make_update(kind, mesh=None, config=CONFIG):
  return _make_update(kind, mesh, config)


@functools.cache
def _make_update(kind, mesh, config):
  pinned = {}
  if mesh is not None:
    everywhere = sharding.replicated(mesh)
    pinned = {"out_shardings": (places(kind, mesh, config), everywhere)}
  objective = objective_of(kind, make_fns(kind, mesh, config))
  return update.make_update(objective, SGD, RATE, **pinned)


def make_state(kind, config=CONFIG):
  params = jax.tree.map(jnp.array, make_params(kind, config))
  return create_train_state(params, SGD)


def updated(kind, batch, mesh=None, config=CONFIG):
  """Returns the state after one update of the weights, and its metrics."""
  state = make_state(kind, config)
  if mesh is not None:
    state = jax.device_put(state, places(kind, mesh, config))
    batch = packing.place(batch, mesh)
  return make_update(kind, mesh, config).whole(state, batch)


def change_of(kind, after, config=CONFIG):
  """Returns the difference that an update has subtracted from parameters."""
  change = lambda old, new: old - np.asarray(new)
  return jax.tree.map(change, make_params(kind, config), after.trained)


@functools.cache
def gradient_of_update(kind, **packing):
  """Returns the change that one update subtracts, and its metrics."""
  after, metrics = updated(kind, make_batch(kind, **packing))
  return change_of(kind, after), metrics


def plain_logprobs(params):
  """Computes log-probs and entropies [B, T] with one sample per row."""
  fns, (rollout, _) = make_fns("policy"), make_data()
  return tiny_run.plain_logprobs(fns, params, rollout, TEMPERATURE)


def plain_values(params):
  """Computes values of the states before response tokens, [B, T]."""
  tokens, present, before = tiny_run.padded(make_data()[0])
  rows = models.PackedRows(
    tokens=tokens,
    segments=present.astype(np.int32),
    positions=np.maximum(present.cumsum(axis=1) - 1, 0),
  )
  outputs, _ = make_fns("value").outputs(params, rows)
  return jnp.take_along_axis(outputs["values"], before, axis=1)


def largest(tree):
  return max(float(np.abs(x).max()) for x in jax.tree.leaves(tree))
