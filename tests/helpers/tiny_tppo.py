"""Windowed runs with recorded steps, shared by the tests of T-PPO.

A small window cuts most responses, which continue with newer weights.
"""

import contextlib
import copy
import dataclasses
import types

import jax
import numpy as np

from jaxrl_llm import checkpoint, metrics
from jaxrl_llm.trainer import loop
from jaxrl_llm.types import Experience, Responses

WINDOW, LIMIT, GROUP, SLOTS = 3, 12, 4, 32
STEPS = 10


def with_learner(run, _estimate=None, **fields):
  """Returns the run with other fields in its learner; may share programs."""
  learner = dataclasses.replace(run.learner, **fields)
  if _estimate is not None:
    vars(learner)["_estimate"] = _estimate
  return dataclasses.replace(run, learner=learner)


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


@dataclasses.dataclass
class Step:
  """Data of one training step, on the host."""

  collected: Responses
  estimated: list[Seen]
  row: dict
  after: loop.States  # Without the learner, whose arrays are donated.

  @property
  def store(self):
    """Responses that were begun or wait for a slot after the step."""
    return self.after.rollout.store


def recording(run, log):
  """Returns the run with calls between its parts recorded in `log`."""
  learner = copy.copy(run.learner)

  def experience(*arguments, **settings):
    made = run.learner._experience(*arguments, **settings)
    log.estimated.append(Seen(*arguments, made))
    return made

  def collect(*arguments, **settings):
    collected = run.worker.collect(*arguments, **settings)
    log.collected.append(jax.tree.map(np.array, collected.batch.responses))
    return collected

  vars(learner)["_experience"] = experience
  worker = types.SimpleNamespace(collect=collect)
  return dataclasses.replace(run, learner=learner, worker=worker)


def record(run, steps, begun=None):
  """Trains; returns the recorded steps, and (states, weights) at the end.

  Args:
    run: the run.
    steps: number of steps.
    begun: (states, weights) to continue from; by default the initial ones.
  """
  log = types.SimpleNamespace(estimated=[], collected=[])
  spied = recording(run, log)
  states, weights = begun or loop.begin(run)
  history = []
  for _ in range(steps):
    log.estimated, log.collected = [], []
    states, weights, row = loop.iterate(
      spied, states, weights, metrics.PhaseTimer(), None
    )
    after = states._replace(learner=None)
    # A run with lag collects several batches in its first step.
    history.append(Step(log.collected[0], log.estimated, row, after))
  return history, (states, weights)


def newest(run, workdir):
  """Returns (states, weights) of the newest checkpoint."""
  folder = workdir / "checkpoints"
  with contextlib.closing(checkpoint.Checkpointer(folder, keep=2)) as saver:
    return loop.restore(run, saver, saver.latest_step())


def saved(run, states, folder):
  """Saves and restores states; returns the restored (states, weights)."""
  with contextlib.closing(checkpoint.Checkpointer(folder, keep=1)) as saver:
    loop.save(states, saver, {})
    saver.wait()
    return loop.restore(run, saver, states.step)
