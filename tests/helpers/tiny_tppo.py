"""Windowed runs with recorded steps, shared by the tests of T-PPO.

A small window cuts most responses, which continue with newer weights. The
critic's packed batches are recorded.
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
MANY = 32  # A mini-batch that takes the critic several steps to fill.


def with_models(run, **members):
  """Returns the run with other models in its learner: policy=..., critic=..."""
  return with_learner(run, members=run.learner.members | members)


def with_learner(run, _estimate=None, **fields):
  """Returns the run with other fields in its learner; may share programs."""
  learner = dataclasses.replace(run.learner, **fields)
  if _estimate is not None:
    learner._estimate = _estimate
  return dataclasses.replace(run, learner=learner)


def patient_of(run):
  """Returns the run whose critic waits for mini-batches of `MANY` responses."""
  critic = run.learner.critic
  settings = dataclasses.replace(critic.settings, mini_batch=MANY)
  return with_models(run, critic=dataclasses.replace(critic, settings=settings))


def whole_responses(run, **changes):
  """Returns the run with responses that end before the update (no windows)."""
  return with_config(run, schedule__window=0, **changes)


@dataclasses.dataclass
class Seen:
  """Inputs and result of one estimation."""

  responses: Responses
  scores: dict[str, np.ndarray]
  version: int
  critic_rows: np.ndarray
  experience: Experience

  @property
  def rollout(self):
    return self.responses.rollout

  def again(self, run, *, responses=None, critic_rows=None, **scores):
    """Returns the experience of the run's learner from other inputs."""
    return run.learner._experience(
      self.responses if responses is None else responses,
      self.scores | scores,
      self.version,
      self.critic_rows if critic_rows is None else critic_rows,
    )


@dataclasses.dataclass
class Step:
  """Data of one training step, on the host."""

  collected: Responses
  estimated: list[Seen]
  critic: list  # PackedBatches in the order of the updates.
  row: dict
  after: loop.States  # Without the models, whose arrays are donated.
  critic_updates: int

  @property
  def store(self):
    """Responses that were begun or wait for a slot after the step."""
    return self.after.rollout.store

  @property
  def waiting(self):
    """Responses that the critic has not seen after the step."""
    return self.after.learner.waiting


def recording(run, log):
  """Returns the run with calls between its parts recorded in `log`."""

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
  """Trains; returns the recorded steps, and (states, weights) at the end.

  Args:
    run: the run.
    steps: number of steps.
    begun: (states, weights) to continue from; by default the initial ones.
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
  """Returns (states, weights) of the newest checkpoint."""
  saver = checkpoint.Checkpointer(workdir / "checkpoints", keep=2)
  found = loop.restore(run, saver, saver.latest_step())
  saver.close()
  return found


def saved(run, states, folder):
  """Saves and restores states; returns the restored (states, weights)."""
  saver = checkpoint.Checkpointer(folder, keep=1)
  loop.save(states, saver, {})
  saver.wait()
  found = loop.restore(run, saver, states.step)
  saver.close()
  return found
