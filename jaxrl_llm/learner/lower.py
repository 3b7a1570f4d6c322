"""Lowers a learner's phases at their largest shapes, without running them."""

import functools
from typing import Any

import jax
import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.learner import providers
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.members import Member
from jaxrl_llm.learner.packing import PackedBatch
from jaxrl_llm.learner.parts import evaluate, leaves_of
from jaxrl_llm.models import PackedRows, Params
from jaxrl_llm.sampling import EngineConfig, new_requests
from jaxrl_llm.types import unjudged

# Member -> name of its scores in program names.
_SCORES = {"policy": "log-probs", "value": "values"}


def lower(learner: Learner) -> dict[str, jax.stages.Lowered]:
  """Lowers scoring and updates without running them."""
  lowered = {}
  for member in learner.members.values():
    training = member.training
    weights = ["weights", *(f"{name}/weights" for name in training.auxiliary)]
    batch = _abstract_batch(learner, member, {*weights, *training.reads})
    if training.step_scale is not None:
      scalar = jax.ShapeDtypeStruct((), np.float32)
      batch = batch.replace(step_scale=scalar)
    name = training.objective.name
    base = learner.policy.params if training.reads_policy else member.base
    lowered[f"score {_SCORES.get(name, name)}"] = member.score.lower(
      Params(base, member.shapes.trained), batch.packed
    )
    lowered[f"update {name}"] = member.update.whole.lower(
      member.shapes, batch, base=base
    )
  batch = _abstract_batch(learner, learner.policy, set())
  for name, frozen in learner.frozen.items():
    lowered[f"score {name}"] = frozen.score.lower(frozen.shapes, batch.packed)
  return lowered


def _abstract_batch(
  learner: Learner, model: Member, names: set[str]
) -> PackedBatch:
  """Returns a mini-batch of ShapeDtypeStructs, placed like `packing.place`."""
  settings, mesh = model.settings, learner.mesh
  micro_batches = -(-settings.mini_batch // settings.micro_batch_size)
  row = learner.settings.max_tokens_per_row
  shape = (micro_batches, settings.micro_batch_size, row)
  along = sharding.along_batch(mesh, axis=1)
  of = functools.partial(jax.ShapeDtypeStruct, shape, sharding=along)
  choices = learner.policy.fns.choices
  if choices is not None:
    choices = jax.ShapeDtypeStruct(
      (*shape, *choices.shape), choices.dtype, sharding=along
    )
  tokens = ("tokens", "targets", "segments", "prefixes", "positions", "samples")
  whole = jax.ShapeDtypeStruct((), np.int32, sharding=sharding.replicated(mesh))
  return PackedBatch(
    packed=PackedRows(
      **{name: of(np.int32) for name in tokens},
      mask=of(np.bool_),
      logprobs=of(np.float32),
      choices=choices,
      count=whole,
      temperature=jax.ShapeDtypeStruct((), np.float32, sharding=whole.sharding),
    ),
    mask=of(np.bool_),
    inputs={name: of(_dtype(learner, name)) for name in names},
    schedule_step=whole,
    own_weight=jax.ShapeDtypeStruct((), np.float32, sharding=whole.sharding),
  )


def _dtype(learner: Learner, name: str) -> Any:
  """Returns the data type of an input; those of models are float32."""
  parts, count = learner.algorithm.parts, learner.policy.settings.mini_batch
  sizes = EngineConfig(
    max_prompt_length=1, max_response_length=1, stop_tokens=(), slots=1
  )
  responses = unjudged(new_requests([[0]], [range(count)], [0], sizes))
  leaves, column = leaves_of([name], parts), lambda *_: np.zeros(count, "f")
  given = providers.of_responses(responses, 0, leaves, column)
  if not leaves <= given.keys():
    return np.float32
  return jax.eval_shape(lambda x: evaluate([name], parts, x), given)[name].dtype
