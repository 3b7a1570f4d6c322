"""Tiny runs whose sampler shares the trainer's mesh or has a separate one."""

import contextlib
import functools
from unittest import mock

from helpers import tiny_run

from jaxrl_llm.trainer import build

# Without a critic: nothing here depends on it.
PLAIN = {
  "estimator__name": "group",
  "value__pretrain_steps": 0,
  "run__steps": 4,
  **tiny_run.EVALUATES_LIKE_A_STEP,
  "eval__every": 2,
  "optimizer__policy__micro_batch_size": 8,
  "optimizer__value__micro_batch_size": 8,
}
MESHES = {
  "shared": {"mesh__data": 2},
  # Two devices train, two others generate.
  "apart": {"mesh__data": 2, "sampler__mesh__data": 2},
  # The same eight devices: sharded weights there, replicated weights here.
  "rearranged": {"mesh__data": 1, "mesh__fsdp": 8, "sampler__mesh__data": 8},
}
# The sampler has quantized copies of the weights, too.
MESHES["drafting"] = MESHES["apart"] | {
  "sampler__drafter": "quantized_copy",
  "sampler__num_draft_tokens": 1,
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


@contextlib.contextmanager
def recorded(run):
  """Yields a list that all rollouts of the run's engine are added to."""
  engine, rollouts = run.worker.writer.engine, []
  write = engine.generate_window

  def recording(*arguments, **settings):
    rollouts.append(write(*arguments, **settings))
    return rollouts[-1]

  with mock.patch.object(engine, "generate_window", recording):
    yield rollouts
