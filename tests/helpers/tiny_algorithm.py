"""A small batch of ended responses for algorithms, shared by tests."""

import functools

import jax
import numpy as np
from helpers import tiny_run

from jaxrl_llm.learner import core, members, packing, parts
from jaxrl_llm.types import Status, take_rows

ROWS, ROOM, GROUP = 12, 9, 4


def make_algorithm(**changes):
  return core.make_algorithm(tiny_run.make_config("none", **changes))


def evaluate(made, given):
  """Computes an algorithm's experience from just the inputs it declares."""
  estimate = functools.partial(
    parts.evaluate, sorted(made.experience), made.parts
  )
  return jax.jit(estimate)({name: given[name] for name in made.leaves})


def make_inputs(seed=0, *, rows=8, room=7, **changes):
  """Makes inputs of estimators: groups of two, rewards on the last tokens."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, room + 1, rows)
  column = np.arange(room)[None]
  draw = lambda: rng.normal(size=(rows, room)).astype(np.float32)
  rewards = np.where(rng.random(rows) < 0.5, 1.0, -1.0).astype(np.float32)
  inputs = {
    "token_rewards": np.where(
      column == lengths[:, None] - 1, rewards[:, None], 0
    ),
    "values": draw(),
    "next_values": draw()[:, 0],
    "mask": column < lengths[:, None],
    "judged": np.ones(rows, bool),
    "lengths": lengths,
    "status": np.full(rows, int(Status.FINISHED)),
    "truncated": np.zeros(rows, bool),
    "groups": np.arange(rows) // 2,
    "old_logprobs": draw(),
    "behavior_logprobs": draw(),
    "gradient_norms": np.abs(draw()[:, 0]),
  }
  return inputs | changes


def compute(made, name, inputs):
  """Computes one input of an algorithm."""
  evaluate = lambda known: parts.evaluate([name], made.parts, known)
  return np.asarray(call(evaluate, inputs)[name])


def call(part, inputs):
  """Calls a compiled part of an algorithm."""
  return jax.jit(lambda known: part(known))(inputs)


@functools.cache
def make_rollout():
  rollout = tiny_run.random_rollout(
    np.random.default_rng(3), rows=ROWS, room=ROOM, group_size=GROUP
  )
  full = np.arange(ROOM)[None] < rollout.lengths[:, None]
  return rollout.replace(
    behavior_logprobs=np.where(full, rollout.behavior_logprobs - 2.0, 0.0)
  )


def noise(seed):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(ROWS, ROOM)).astype(np.float32)


def make_experience(made, *, old_logprobs=None, **others):
  """Computes the experience of one batch of ended responses, on the host.

  Args:
    made: the algorithm.
    old_logprobs: the policy's log-probs; by default the sampler's.
    **others: replacements of default inputs.
  """
  rollout = make_rollout()
  correct = np.arange(ROWS) % 3 == 0
  if old_logprobs is None:
    old_logprobs = rollout.behavior_logprobs
  given = dict(rollout.items()) | {
    "rewards": np.where(correct, 1.0, -1.0).astype(np.float32),
    "correct": correct,
    "judged": np.ones(ROWS, bool),
    "update_version": np.int32(0),
    "old_logprobs": old_logprobs.astype(np.float32),
    "entropies": np.abs(noise(4)),
    "ref_logprobs": rollout.behavior_logprobs + 0.1 * noise(5),
    "values": noise(6),
    "next_values": noise(7)[:, 0],
  }
  return jax.device_get(evaluate(made, given | others))


@functools.cache
def make_batch():
  """Makes one mini-batch whose rows contain several responses each."""
  (batch,) = packing.mini_batches(
    make_rollout(), size=ROWS, rng=None, capacity=40, rows=2
  )
  per_row = [np.unique(x[x > 0]).size for x in flat(batch.packed.segments)]
  assert max(per_row) > 2
  return batch


def flat(packed):
  """Joins the rows of all micro-batches, [M, r, C] -> [M r, C]."""
  return np.reshape(packed, (-1, packed.shape[-1]))


def policy_batch(made, **settings):
  batch = make_batch()
  inputs = take_rows(make_experience(made, **settings), batch.rows)
  return pack_policy(inputs, batch, made)


def pack_policy(inputs, batch, made, size=None):
  """Packs a mini-batch as a policy update does."""
  return members.policy_training(None, made).prepare(inputs, batch, size)


def pack_critic(inputs, batch, made, size=None):
  """Packs a mini-batch as a critic update does."""
  return members.critic_training(None, made).prepare(inputs, batch, size)


def inputs_of_loss(batch):
  """Returns the inputs of the policy loss from a packed batch, [M r, C]."""
  inputs = {name: flat(x) for name, x in batch.inputs.items()}
  return inputs | {
    "mask": flat(batch.mask),
    "segments": flat(batch.packed.segments),
  }
