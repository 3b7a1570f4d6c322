"""Windowed runs whose steps are recorded, shared by the tests of T-PPO.

A small window cuts most responses: they go on under newer weights. What the
losses saw is read from the packed batches of the updates.
"""

import collections
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
  policy: list  # PackedBatches in the order of the updates.
  critic: list
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

  learner, seen = run.learner, {"policy": log.policy, "critic": log.critic}
  run = with_models(
    run, **{k: noted(x, seen[k]) for k, x in learner.members.items()}
  )

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
  log = types.SimpleNamespace(policy=[], critic=[], estimated=[], collected=[])
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
        policy=list(log.policy),
        critic=list(log.critic),
        row=row,
        after=states._replace(
          learner=learner.replace(models={}, companions={})
        ),
        critic_updates=learner.critic and int(learner.critic.optimizer.step),
      )
    )
  return history, (states, weights)


def trained_tokens(batches):
  """(context with the token itself) -> how often a loss counted it.

  Read from the packed rows: a token is named by all tokens up to it.
  """
  count = collections.Counter()
  for batch in batches:
    packed = batch.packed
    # The packed rows' own mask has tokens that other losses read, too.
    for place in np.argwhere(batch.mask):
      count[named(packed, *place)] += 1
  return count


def named(packed, m, r, c):
  """All tokens of the sample up to the target of a packed position."""
  row = {k: packed[k][m, r] for k in ("tokens", "segments", "prefixes")}
  segment, prefix = row["segments"][c], row["prefixes"][c]
  here = np.arange(row["tokens"].size) <= c
  own = (row["segments"] == segment) & here
  shared = (row["segments"] == prefix) & (prefix > 0)
  context = [*row["tokens"][shared], *row["tokens"][own]]
  return (*map(int, context), int(packed.targets[m, r, c]))


def written_tokens(rollout, rows, begins=None):
  """The same names for the tokens of a rollout, from `begins` on."""
  count = collections.Counter()
  for i in rows:
    prompt = rollout.prompt_tokens[i, : rollout.prompt_lengths[i]]
    whole = (*map(int, prompt), *map(int, rollout.tokens[i]))
    for t in range(0 if begins is None else begins[i], rollout.lengths[i]):
      count[whole[: len(prompt) + t + 1]] += 1
  return count


def total(counters):
  return sum(counters, collections.Counter())


def ended_ids(responses):
  """Sample ids of the responses that ended."""
  return responses.rollout.sample_id[responses.ended].tolist()


def written_in(step):
  """Names of the tokens that a step wrote."""
  rollout = step.collected.rollout
  rows = range(len(rollout.lengths))
  return written_tokens(rollout, rows, rollout.window_start)


def released_in(step):
  """Names of all tokens of the responses that ended in a step."""
  rows = np.flatnonzero(step.collected.ended)
  return written_tokens(step.collected.rollout, rows)


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
