"""One iteration of training: the steps 1 to 9 that `loop` describes."""

import functools
from typing import Any

from jaxrl_llm import metrics, sync
from jaxrl_llm.learner.replay import update_twice
from jaxrl_llm.learner.state import LearnerState
from jaxrl_llm.rollout.records import Batch
from jaxrl_llm.rollout.writer import Weights
from jaxrl_llm.trainer.run import Run, States
from jaxrl_llm.trainer.samples import samples_of_step


def iterate(
  run: Run,
  states: States,
  weights: sync.VersionedWeights,
  timer: metrics.PhaseTimer,
  logger: Any,
) -> tuple[States, sync.VersionedWeights, dict[str, float]]:
  """Runs an iteration; returns new states, new weights and metrics."""
  sync.check_version(weights, states.step)
  given = sampled_with(run, states, weights)

  config, scored = run.config.run, []
  # In all processes: the scored batch is sharded over their devices.
  shows = config.samples_every
  shows = shows and (states.step + 1) % config.samples_every == 0

  # 1. Draw prompts, 2. generate, 3. reward ended responses: for a batch that is
  # trained on now, or `schedule.lag` updates later.
  with run.pipeline.writing(
    functools.partial(run.worker.collect, weights=given, timer=timer),
    states.rollout,
    states.source,
    version=states.step,
    ready=len(states.batches),
  ) as written:
    # 4. Score, 5. estimate, 6. pack, 7. update.
    def watch(batch):
      run.check_batch(batch)
      if shows:
        scored.append(batch)

    learner, row, batch = _learn(run, states, written, timer, watch)
    with timer.phase("wait"):
      collected = [future.result() for future in written]
  row = batch.metrics | row
  states = States(
    source=collected[-1].source_state,
    rollout=collected[-1].state,
    learner=learner,
    batches=(*states.batches, *(new.batch for new in collected))[1:],
  )
  # 8. Sync the new weights to the sampler.
  with timer.phase("sync"):
    weights = run.transfer.send(
      learner.params("policy"), learner.step, replaces=weights
    )
  every = run.config.sampler.parity_check_every
  if every and states.step % every == 0:
    with timer.phase("sync"):
      row |= check_sampler(run, states, weights)
  # 9. Log.
  if shown := samples_of_step(run, batch, collected, scored):
    logger.samples(states.step, shown)
  return states, weights, row


def _learn(
  run, states, written, timer, scored
) -> tuple[LearnerState, dict, Batch]:
  """Trains on the next batch, or on its groups as they arrive."""
  if run.pipeline.streaming:
    groups = run.pipeline.arriving(written, states.step, timer)
    learner, row = run.learner.update(states.learner, groups, timer, scored)
    return learner, row, written[0].result().batch
  with timer.phase("wait"):
    batch = states.batches[0] if states.batches else written[0].result().batch
  run.pipeline.check(batch, states.step)
  every = run.config.run.replay_every
  due = every and (states.step + 1) % every == 0
  update = functools.partial(update_twice, run.learner)
  update = update if due else run.learner.update
  learner, row = update(states.learner, batch.responses, timer, scored)
  return learner, row, batch


def sampled_with(
  run: Run, states: States, weights: sync.VersionedWeights
) -> Weights:
  """Returns the sampler's weights, with functions of the learner's state."""
  return Weights(
    weights.params,
    weights.version,
    states.learner.processor_states,
    lambda name, rollout: run.learner.read(states.learner, name, rollout),
  )


def check_sampler(
  run: Run, states: States, weights: sync.VersionedWeights
) -> dict[str, float]:
  """Checks that sampler and trainer have equal weights and log-probs.

  Weights must have the same checksums and, unless `sampler.parity_check_every`
  is 0, give fixed tokens the same log-probs in the built-in engine. This is
  checked only at each start and every few steps: within a process, only a bug
  can make them differ. Sampled tokens are compared in every step.

  Raises:
    SyncError: They differ, so samples would not be from the policy.
  """
  params = states.learner.params("policy")
  sync.verify(weights, run.transfer.checksums(params), version=states.step)
  if run.parity_check is None or not run.config.sampler.parity_check_every:
    return {}
  error = run.parity_check(params, weights)
  return {"sampler_trainer/parity_error": error}
