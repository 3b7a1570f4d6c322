"""Tiny runs whose sampler shares the trainer's mesh or has a separate one."""

import dataclasses
import functools

from helpers import tiny_run

from jaxrl_llm.trainer import build

# Without a critic: nothing here depends on it.
PLAIN = {
  "estimator__name": "group",
  "value__pretrain_steps": 0,
  "run__steps": 4,
  "eval__every": 2,
  "optimizer__policy__micro_batch_size": 8,
  "optimizer__value__micro_batch_size": 8,
}
MESHES = {
  "shared": {"mesh__data": 4},
  # Four devices train, the other four generate.
  "apart": {"mesh__data": 4, "sampler__mesh__data": 4},
  # The same eight devices: sharded weights there, replicated weights here.
  "rearranged": {"mesh__data": 1, "mesh__fsdp": 8, "sampler__mesh__data": 8},
}


def run_maker(model):
  """Returns a function from a name in MESHES to its run, built only once."""

  @functools.cache
  def make(name):
    return build.make_run(tiny_run.make_config(model, **PLAIN | MESHES[name]))

  return make


class Spy:
  """An object with some methods replaced."""

  def __init__(self, spied, **replaced):
    self._spied = spied
    self.__dict__ |= replaced

  def __getattr__(self, name):
    return getattr(self._spied, name)


def recorded(run):
  """Returns the run, and a list that its engine's rollouts are added to."""
  rollouts = []

  def kept(write):
    def call(*arguments, **settings):
      rollouts.append(write(*arguments, **settings))
      return rollouts[-1]

    return call

  engine = run.worker.writer.engine
  engine = Spy(engine, generate_window=kept(engine.generate_window))
  return with_engine(run, engine), rollouts


def with_engine(run, engine):
  """Returns the run with the given engine for all generation."""

  def writing(worker):
    writer = dataclasses.replace(worker.writer, engine=engine)
    return dataclasses.replace(worker, writer=writer)

  pretraining = run.pretraining
  if pretraining is not None:
    pretraining = dataclasses.replace(
      pretraining, worker=writing(pretraining.worker)
    )
  return dataclasses.replace(
    run,
    worker=writing(run.worker),
    pretraining=pretraining,
    evaluators=[
      dataclasses.replace(
        one, writer=dataclasses.replace(one.writer, engine=engine)
      )
      for one in run.evaluators
    ],
  )
