"""A learner's phases at their largest shapes, compiled without running."""

import functools

import jax
import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.models import TrainedModel
from jaxrl_llm.learner.packing import PackedBatch, PackedTokens


def lower(learner: Learner) -> dict[str, jax.stages.Lowered]:
  """Lowers scoring and updates, running nothing."""
  scalar = jax.ShapeDtypeStruct((), np.float32)
  policy, algorithm = learner.policy, learner.algorithm
  names = {"weights", *algorithm.policy_inputs}
  names |= {f"{name}_weights" for name in algorithm.auxiliary}
  batch = _abstract_batch(learner, policy, names)
  if algorithm.step_scale is not None:
    batch = batch.replace(step_scale=scalar)
  lowered = {
    "score log-probs": policy.score.lower(policy.params, batch.packed, scalar),
    "update policy": policy.update.lower(
      policy.shapes, batch, scalar, base=policy.base
    ),
  }
  critic = learner.critic
  if critic is None:
    return lowered
  names = {"weights", *algorithm.value_inputs}
  batch = _abstract_batch(learner, critic, names)
  return lowered | {
    "score values": critic.score.lower(critic.params, batch.packed),
    "update value": critic.update.lower(critic.shapes, batch, base=critic.base),
  }


def _abstract_batch(
  learner: Learner, model: TrainedModel, names: set[str]
) -> PackedBatch:
  """A mini-batch of ShapeDtypeStructs, as `packing.place` would put it."""
  settings, mesh = model.settings, learner.mesh
  micro_batches = -(-settings.mini_batch // settings.micro_batch_size)
  row = learner.settings.max_tokens_per_row
  of = functools.partial(
    jax.ShapeDtypeStruct,
    (micro_batches, settings.micro_batch_size, row),
    sharding=sharding.along_batch(mesh, axis=1),
  )
  tokens = ("tokens", "targets", "segments", "prefixes", "positions")
  whole = jax.ShapeDtypeStruct((), np.int32, sharding=sharding.replicated(mesh))
  return PackedBatch(
    packed=PackedTokens(
      **{name: of(np.int32) for name in tokens},
      mask=of(np.bool_),
      logprobs=of(np.float32),
      count=whole,
    ),
    mask=of(np.bool_),
    inputs={name: of(np.float32) for name in names},
    schedule_step=whole,
  )
