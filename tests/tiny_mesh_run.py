"""Tiny runs whose sampler shares the trainer's mesh, or has its own."""

import dataclasses
import functools

import tiny_run

from jaxrl_llm.train import build

# A run without a critic: nothing here depends on one.
PLAIN = {
  "estimator__name": "group",
  "value__pretrain_steps": 0,
  "run__steps": 4,
  "eval__every": 2,
  "optimizer__policy__micro_rows": 8,
  "optimizer__value__micro_rows": 8,
}
MESHES = {
  "shared": {"mesh__data": 4},
  # Four devices train, four others write.
  "apart": {"mesh__data": 4, "sampler__mesh__data": 4},
  # The same eight devices: weights split there, whole here.
  "rearranged": {
    "mesh__data": 1,
    "mesh__fsdp": 8,
    "sampler__mesh__data": 8,
  },
}


def job_maker(model):
  """A function from a name of MESHES to its job, which is built once."""

  @functools.cache
  def make(name):
    return build.make_job(tiny_run.make_config(model, **PLAIN | MESHES[name]))

  return make


def with_config(job, **changes):
  """The job under settings that do not change what is compiled."""
  config = job.config.copy_and_resolve_references()
  config.update_from_flattened_dict(
    {key.replace("__", "."): value for key, value in changes.items()}
  )
  return dataclasses.replace(job, config=config)


class Spy:
  """An object of which some methods are others."""

  def __init__(self, spied, **replaced):
    self._spied = spied
    self.__dict__ |= replaced

  def __getattr__(self, name):
    return getattr(self._spied, name)


def recorded(job):
  """The job, and the list that its engine's rollouts are added to."""
  rollouts = []

  def kept(write):
    def call(*arguments, **settings):
      rollouts.append(write(*arguments, **settings))
      return rollouts[-1]

    return call

  engine = Spy(
    job.engine,
    generate=kept(job.engine.generate),
    generate_window=kept(job.engine.generate_window),
  )
  return dataclasses.replace(job, engine=engine), rollouts
