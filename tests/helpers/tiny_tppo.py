"""Windowed runs whose steps are recorded, shared by the tests of T-PPO.

A small window cuts most responses: they go on under newer weights. The packed
batches of the critic are kept.
"""

import dataclasses
import types

import jax
import numpy as np
from helpers.tiny_run import with_config

from jaxrl_llm import checkpoint, metrics
from jaxrl_llm.trainer import loop
from jaxrl_llm.types import Experience, Responses

WINDOW, LIMIT, GROUP, SLOTS = 3, 12, 4, 32
STEPS = 10
MANY = 32  # A mini-batch for which the critic waits several steps.


def with_models(run, **members):
  """The run whose learner has other models: policy=... or critic=..."""
  return with_learner(run, members=run.learner.members | members)


def with_learner(run, _estimate=None, **fields):
  """The run whose learner has other fields; what is compiled may be shared."""
  learner = dataclasses.replace(run.learner, **fields)
  if _estimate is not None:
    learner._estimate = _estimate
  return dataclasses.replace(run, learner=learner)


def patient_of(run):
  """The run whose critic waits for a mini-batch of `MANY` responses."""
  critic = run.learner.critic
  settings = dataclasses.replace(critic.settings, mini_batch=MANY)
  return with_models(run, critic=dataclasses.replace(critic, settings=settings))


def whole_responses(run, **changes):
  """The same method with responses that end before the update."""
  return with_config(run, schedule__window=0, **changes)


@dataclasses.dataclass
class Seen:
  """An estimation: what was given, and what was made of it."""

  responses: Responses
  scores: dict[str, np.ndarray]
  version: int
  critic_rows: np.ndarray
  experience: Experience

  @property
  def rollout(self):
    return self.responses.rollout

  def again(self, run, *, responses=None, critic_rows=None, **scores):
    """What the run's learner makes of other inputs."""
    return run.learner._experience(
      self.responses if responses is None else responses,
      self.scores | scores,
      self.version,
      self.critic_rows if critic_rows is None else critic_rows,
    )


@dataclasses.dataclass
class Step:
  """What happened in an iteration, on the host."""

  collected: Responses
  estimated: list[Seen]
  critic: list  # PackedBatches in the order of the updates.
  row: dict
  after: loop.States  # Without the models, whose arrays are given away.
  critic_updates: int

  @property
  def store(self):
    """Responses that were begun, or wait for a slot, after the step."""
    return self.after.rollout.store

  @property
  def waiting(self):
    """Responses that the critic has not seen after the step."""
    return self.after.learner.waiting


def recording(run, log):
  """The run that notes in lists what its owners hand over."""

  def noted(model, seen):
    def whole(state, batch, *settings, base):
      seen.append(jax.device_get(batch))
      return model.update(state, batch, *settings, base=base)

    update = model.update._replace(whole=whole)
    return dataclasses.replace(model, update=update)

  learner, members = run.learner, {}
  if learner.critic is not None:
    members["critic"] = noted(learner.critic, log.critic)
  run = with_models(run, **members)

  def experience(*arguments, **settings):
    made = learner._experience(*arguments, **settings)
    log.estimated.append(Seen(*arguments, made))
    return made

  def collect(*arguments, **settings):
    collected = run.worker.collect(*arguments, **settings)
    log.collected.append(jax.tree.map(np.array, collected.batch.responses))
    return collected

  run.learner._experience = experience
  return dataclasses.replace(run, worker=types.SimpleNamespace(collect=collect))


def record(run, steps, begun=None):
  """Iterates: [Step], and (states, weights) at the end.

  Args:
    run: the owners.
    steps: how many.
    begun: (states, weights) to go on from; the start by default.
  """
  log = types.SimpleNamespace(critic=[], estimated=[], collected=[])
  spied = recording(run, log)
  states, weights = begun or loop.begin(run)
  history = []
  for _ in range(steps):
    for seen in vars(log).values():
      seen.clear()
    states, weights, row = loop.iterate(
      spied, states, weights, metrics.PhaseTimer(), None
    )
    learner = states.learner
    history.append(
      Step(
        collected=log.collected[0],
        estimated=list(log.estimated),
        critic=list(log.critic),
        row=row,
        after=states._replace(
          learner=learner.replace(models={}, companions={})
        ),
        critic_updates=learner.critic and int(learner.critic.optimizer.step),
      )
    )
  return history, (states, weights)


def newest(run, workdir):
  """(states, weights) of the newest checkpoint."""
  saver = checkpoint.Checkpointer(workdir / "checkpoints", keep=2)
  found = loop.restore(run, saver, saver.latest_step())
  saver.close()
  return found


def saved(run, states, folder):
  """(states, weights) after they went through a checkpoint."""
  saver = checkpoint.Checkpointer(folder, keep=1)
  loop.save(states, saver, {})
  saver.wait()
  found = loop.restore(run, saver, states.step)
  saver.close()
  return found
