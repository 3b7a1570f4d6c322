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
from jaxrl_llm.learner.build_algorithm import make_algorithm
from jaxrl_llm.learner.optimizer import create_train_state
from jaxrl_llm.types import take_rows

SAMPLES, PROMPT, ROOM = 16, 7, 9
CAPACITY = 24  # Some samples share their prompt, others do not.
TEMPERATURE = np.float32(0.8)
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
POLICY_LOSS = functools.partial(losses.clipped_policy_loss, **CLIPS)
RATE = lambda step: 1e-2 + 0.0 * step
# The first update of the parameters equals the gradient, but there is an
# optimizer state.
SGD = optax.sgd(1.0, momentum=0.9)


@functools.cache
def make_fns(kind, mesh=None):
  config, settings = tiny_run.model_config(), {}
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
def make_params(kind):
  """Makes random weights on the host, with gradients of all sizes."""
  params = jax.eval_shape(make_fns(kind).init, jax.random.key(0))
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
    "ref_logprobs": make_reference(),
  }
  return rollout, data


@functools.cache
def make_reference():
  """Makes the reference policy's log-probs for the KL, [B, T]."""
  draw = np.random.default_rng(3).normal(size=(SAMPLES, ROOM))
  return -3.0 + 0.5 * draw.astype(np.float32)


# Clip bounds much wider than the paper's, so that some responses are inside.
GSPO = {"clip_low": 0.05, "clip_high": 0.3}
ALGORITHMS = {
  "policy": make_algorithm(tiny_run.make_config("none")),
  "gspo": make_algorithm(
    tiny_run.make_config(
      "none",
      loss__name="gspo",
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
  micro_batch_size,
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
  batch = packing.MiniBatch(rows, layout, rollout)
  inputs = take_rows(data, rows)
  if kind == "value":
    return pack_critic(inputs, batch, ALGORITHMS["policy"], size)
  return pack_policy(inputs, batch, ALGORITHMS[kind], size)


def with_input(batch, name, values):
  """Returns the batch with one input replaced."""
  return batch.replace(inputs=batch.inputs | {name: values})


@functools.cache
def make_update(kind, mesh=None):
  fns = make_fns(kind, mesh)
  pinned = {}
  if mesh is not None:
    shapes = jax.eval_shape(lambda: create_train_state(make_params(kind), SGD))
    places = sharding.tree_shardings(shapes, mesh)
    pinned = {"out_shardings": (places, sharding.replicated(mesh))}
  return update.make_update(
    objective_of(kind, fns), SGD, RATE, **pinned
  ), pinned


def objective_of(kind, fns):
  if kind == "value":
    return update.value_objective(fns, ALGORITHMS["policy"].value_loss)
  return policy_objective(fns, kind)


def policy_objective(fns, kind="policy"):
  chosen = ALGORITHMS[kind]
  return update.policy_objective(fns, chosen.policy_loss, chosen.auxiliary)


def make_state(kind):
  params = jax.tree.map(jnp.array, make_params(kind))
  return create_train_state(params, SGD)


def settings_of(kind):
  return () if kind == "value" else (TEMPERATURE,)


def change_of(kind, after):
  """Returns the difference that an update has subtracted from parameters."""
  change = lambda old, new: old - np.asarray(new)
  return jax.tree.map(change, make_params(kind), after.trained)


@functools.cache
def gradient_of_update(kind, **packing):
  """Returns the change that one update subtracts, and its metrics."""
  batch = make_batch(kind, **{"micro_batch_size": 4} | packing)
  after, metrics = make_update(kind)[0](
    make_state(kind), batch, *settings_of(kind)
  )
  return change_of(kind, after), metrics


def plain_logprobs(params):
  """Computes log-probs and entropies [B, T] with one sample per row."""
  rollout, _ = make_data()
  tokens, present, before = tiny_run.padded(rollout)
  logits = make_fns("policy").logits(params, tokens, present) / TEMPERATURE
  everything = jax.nn.log_softmax(logits)
  at = jnp.take_along_axis(everything, before[..., None], axis=1)
  logprobs = jnp.take_along_axis(
    at, rollout.tokens[..., None].astype(np.int32), axis=2
  )[..., 0]
  return logprobs, -jnp.sum(jnp.exp(at) * at, axis=2)


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
