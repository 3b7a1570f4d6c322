"""The training loop, described for VAPO (arXiv 2504.05118).

Before the first iteration the critic is pretrained: responses are sampled from
the fixed policy and V is regressed on their Monte Carlo returns. An iteration
is

  1. draw prompts            N questions, in the order of `data.order`
  2. generate                G responses each, sampled from the policy
  3. reward                  a verifier reads the text: +1 or -1
  4. score                   log π_old and V of every token, in packed rows
  5. estimate                decoupled GAE: advantages with λ = 1 − 1/(α·length)
                             of each response, critic targets with λ = 1
  6. pack                    mini-batches and their loss weights (token mean)
  7. update                  critic, then policy: clip-higher surrogate plus
                             μ times the NLL of correct responses
  8. sync                    new weights to the sampler
  9. log, evaluate, save

Three components do the work: a prompt source (1), a rollout worker (2 and 3)
and a learner (4 to 7). The loop passes records between them; the state of each
is an immutable value. With `schedule.lag` the worker is some batches ahead of
the learner, and both run concurrently.

Other methods make other choices for the same steps. In the worker, T-PPO
samples a window of every response, DAPO samples until enough groups are mixed,
and APRIL takes the groups that end first. In the learner, an algorithm defines
the mathematics; a method without a critic leaves it out. States and seed
determine everything that follows, so that a resumed run repeats the
uninterrupted one.
"""

import contextlib
import functools
import os
import pathlib
import shutil
import time
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_llm import checkpoint, metrics, sync
from jaxrl_llm.errors import InputError, TrainingStopped
from jaxrl_llm.system import processes, signals
from jaxrl_llm.system.processes import of_first
from jaxrl_llm.trainer import speed, summary
from jaxrl_llm.trainer.bounds import bounds
from jaxrl_llm.trainer.iteration import check_sampler, iterate, sampled_with
from jaxrl_llm.trainer.run import Run, States, restore, save
from jaxrl_llm.trainer.value_pretraining import CHECKPOINTS
from jaxrl_llm.trainer.workdir import Workdir
from jaxrl_llm.workdir import ROWS, best_step, describe


def train(
  run: Run,
  workdir: str | os.PathLike,
  *,
  step: int | None = None,
  begun: float | None = None,
) -> int:
  """Trains or resumes until the last step or a signal.

  Args:
    run: the components.
    workdir: directory of the run, created if necessary. A checkpoint in it is
      resumed, and changes of the config are recorded in config_changes.jsonl.
    step: checkpoint to resume; None is the newest. Later ones are set aside.
    begun: `time.perf_counter()` at the start of the program; now if None.

  Returns:
    0 if the run is complete; otherwise the signal that stopped it before its
    last step, or `signals.SUSPECT`.

  Raises:
    TrainingStopped: The run cannot continue, for example after several
      consecutive non-finite updates, if the reward always fails, or if the disk
      is full.
    InputError: The checkpoint does not fit the run, or the directory cannot be
      used; its files are unchanged.
  """
  folder, config = Workdir(pathlib.Path(workdir)), run.config
  begun = time.perf_counter() if begun is None else begun
  metrics.check_trackers(config.run.trackers)
  with (
    contextlib.closing(run.judge),
    contextlib.closing(run.worker),
    signals.stop_on_signal() as stopped,
    folder.held(),
  ):
    changes, found = folder.changes(config), folder.steps(step)
    saver = checkpoint.Checkpointer(
      folder.path / "checkpoints",
      keep=config.checkpoint.keep,
      keep_every=config.checkpoint.keep_every,
      best=functools.partial(best_step, folder.path, config.checkpoint.best),
    )
    with contextlib.closing(saver), processes.ended_together():
      if found and found[-1] >= config.run.steps:
        print(
          f"the run is at its last step {found[-1]}; raise run.steps to"
          " continue"
        )
        return 0
      return _resume_or_start(
        run, folder, saver, found, changes, stopped, begun
      )


def _resume_or_start(run, folder, saver, found, changes, stopped, begun) -> int:
  """Trains from the newest undamaged checkpoint, or from the start."""
  config, last = run.config, -1
  restored, events = checkpoint.newest_undamaged(
    found, functools.partial(restore, run, saver)
  )
  if restored:
    states, weights = restored
    last = states.step
    facts = saver.record(last, "facts")["facts"]
    events += folder.check_facts(last, facts, run.inputs, changes)
  # Before the logger, which truncates rows after the checkpoint.
  events.append(folder.set_aside(last))
  events += folder.drop_damaged_rows()
  if found:
    events += folder.repair(config)
    folder.record(last, changes)
  elif not folder.begin(config):
    # Left by a run with other settings.
    shutil.rmtree(folder.path / CHECKPOINTS, ignore_errors=True)
  replay = run.worker.replay
  if replay is not None and replay.feed is not None:
    replay.feed.run = folder.run_id()
  with _make_logger(run, folder, saver, last) as logger:
    run.judge.tell = logger.event
    events += [*run.notes, *(one.origin for one in run.evaluators)]
    for line in filter(None, (*summary.describe(run), *events)):
      logger.event(line)
    if not found:
      started = start(run, folder.path, logger, stopped, begun)
      if started is None:
        return stopped.signal
      states, weights = started
      timer = _timer(logger)
      with timer.phase("checkpoint"):
        _save(states, saver, folder, run)
        saver.wait()
    else:
      # The parity error is already in the row of that step.
      check_sampler(run, states, weights)
      logger.event(f"resumed from step {last}")
      for line in describe(changes):
        logger.event(line)
      timer = _timer(logger, spent={"start": time.perf_counter() - begun})
    if of_first(saver.latest_step) is not None:
      shutil.rmtree(folder.path / CHECKPOINTS, ignore_errors=True)
    states = _train_on(
      run, states, weights, folder, saver, logger, stopped, timer
    )
    if states.step >= config.run.steps:
      rows = of_first(metrics.read_rows, folder.path / ROWS)
      for line in summary.reached(rows, folder.path):
        logger.event(line)
      return 0
    logger.event(
      f"stopped by {signals.name(stopped.signal)} at step {states.step},"
      " saved; rerun with the same --workdir to continue"
    )
    return stopped.signal


def _make_logger(run, folder, saver, last_step) -> metrics.PhaseLogger:
  """Returns the run's logger; only that of the first process logs metrics.

  With several processes, it watches their hosts while it is open.
  """
  config, name, role = run.config, processes.name(), ""
  watched = {"stuck_after_s": config.run.stuck_after_s}
  if name:  # Hosts are compared within a role.
    role = "learner" if processes.has_device(run.learner.mesh) else "sampler"
    watched |= {"times": folder.new_times() / f"{name}.jsonl", "role": role}
  if processes.is_first():
    logger = metrics.MetricsLogger(
      folder.path,
      total_steps=config.run.steps,
      last_step=last_step,
      tracked_by=config.run.trackers,
      settings=config.to_dict(),
      **watched,
    )
  else:
    logger = metrics.PhaseLogger(**watched)
  if name and config.run.watch_hosts_s:
    from jaxrl_llm import fleet  # Not needed by one process.

    watch = fleet.HostWatch(
      folder.path / "hosts",
      name,
      config.run.watch_hosts_s,
      logger.event if processes.is_first() else None,
      saver.saving,
      role,
      of_first(time.time) - time.time(),
    )
    logger.enter_context(watch.running())
    logger.more, logger.watchdog.suspects = watch.metrics, watch.describe
  return logger


def _save(states, saver, folder, run) -> None:
  save(states, saver, folder.facts(run.config, run.inputs))


def _timer(logger, **spent) -> metrics.PhaseTimer:
  return metrics.PhaseTimer(
    compiles=metrics.CompileCounter(),
    waited=processes.waited_s,
    on_enter=logger.phase,
    **spent,
  )


def _train_on(
  run, states, weights, folder, saver, logger, stopped, timer
) -> States:
  """Iterates until the last step or a signal, and saves."""
  config = run.config
  # All rows so far, so that a resumed run gives the same warnings.
  rows = of_first(metrics.read_rows, folder.path / ROWS)
  rules = metrics.RULES | bounds(config, run.learner)
  health = metrics.Health(rows, rules)
  unjudged = functools.reduce(_unjudged_in_a_row, rows, 0)
  try:
    while states.step < config.run.steps and not stopped.agreed():
      folder.check()
      stopped.doing = f"step {states.step + 1}"
      states, weights, row = _step(
        run, states, weights, saver, logger, timer, health
      )
      if "host/suspect" in row and config.run.on_suspect == "stop":
        stopped.signal = stopped.signal or signals.SUSPECT
      best, step = config.checkpoint.best, states.step
      if step % config.checkpoint.every == 0 or (
        best in row and of_first(best_step, folder.path, best) == step
      ):
        with timer.phase("checkpoint"):
          _save(states, saver, folder, run)
      unjudged = _unjudged_in_a_row(unjudged, row)
      if unjudged >= config.run.max_skipped:
        break
  except (TrainingStopped, sync.SyncError):
    raise
  except (Exception, SystemExit):  # Such as of a user's loss.
    # Several processes do not fail together, and cannot save together. Arrays
    # of a step that failed half-way cannot be saved either.
    if jax.process_count() == 1:
      with contextlib.suppress(Exception):
        _save_last(states, folder, saver, run, timer)
        logger.event(f"an error; step {saver.latest_step()} is saved")
    raise
  _save_last(states, folder, saver, run, timer)
  if of_first(saver.latest_step) != states.step:
    errors = of_first(saver.new_errors)
    raise TrainingStopped(f"{errors[-1]}; resume with the same --workdir")
  if unjudged >= config.run.max_skipped:
    raise TrainingStopped(
      f"the reward failed on all responses of {unjudged} batches in a row, up"
      f" to step {states.step}, which was saved: {run.judge.failure}; fix the"
      " reward and resume with the same --workdir"
    )
  return states


def _step(run, states, weights, saver, logger, timer, health) -> tuple:
  """Makes a step, and logs its row and warnings about it."""
  states, weights, row = iterate(run, states, weights, timer, logger)
  step = states.step
  if step % run.config.eval.every == 0 or step == run.config.run.steps:
    with timer.phase("evaluate"):
      row |= evaluate(run, states, weights, logger)
  row |= timer.collect()
  for line in saver.new_errors():
    logger.event(line)
  row |= speed.speed(run.learner, row) | {
    "memory/peak_gib": metrics.peak_memory_gib(),
    "checkpoint/failures": saver.failures,
  }
  row |= logger.more()
  holds, warnings = health.check(step, row)
  row |= holds
  # Log first: a checkpoint guarantees that its row is on disk. The time of a
  # save is therefore in the next row.
  logger.log(step, row)
  for warning in warnings:
    logger.event(warning)
  return states, weights, row


def _save_last(states, folder, saver, run, timer) -> None:
  """Saves the states, unless the last checkpoint has them."""
  with timer.phase("checkpoint"):
    saver.wait()
    if of_first(saver.latest_step) != states.step:
      _save(states, saver, folder, run)
      saver.wait()


def _unjudged_in_a_row(before: int, row: Mapping[str, float]) -> int:
  """Counts consecutive batches without any verdict, including this row."""
  if "reward/errors" not in row:  # No response has ended.
    return before
  return 0 if "reward/mean" in row else before + 1


def begin(run: Run) -> tuple[States, sync.VersionedWeights]:
  """Returns the states before the first iteration, with an untrained critic."""
  learner = run.learner.init(critic=run.critic_params)
  states = States(run.source.init(), run.worker.init(), learner)
  return states, run.transfer.send(learner.params("policy"), 0)


def start(
  run: Run,
  workdir: pathlib.Path,
  logger: Any,
  stopped: signals.Stopped,
  begun: float,
) -> tuple[States, sync.VersionedWeights] | None:
  """Starts a run: pretrains the critic and logs the first row.

  Returns None if a signal ended the pretraining.
  """
  states, weights = begin(run)
  if run.config.value.init_from and run.learner.critic is not None:
    logger.event(f"the critic starts from {run.config.value.init_from}")
  if run.pretraining is not None:
    # Otherwise the critic would be fitted to samples from stale weights.
    check_sampler(run, states, weights)
    given = sampled_with(run, states, weights)
    learner = run.pretraining.run(
      states.learner, given, workdir, logger, stopped
    )
    if learner is None:
      return None
    states = states._replace(learner=learner)
  spent = {"start": time.perf_counter() - begun}
  timer = metrics.PhaseTimer(on_enter=logger.phase, spent=spent)
  row = check_sampler(run, states, weights)
  with timer.phase("evaluate"):
    row |= evaluate(run, states, weights, logger)
  logger.log(0, row | timer.collect())
  return states, weights


def evaluate(
  run: Run, states: States, weights: sync.VersionedWeights, logger: Any
) -> dict[str, float]:
  """Returns avg@k and pass@k on each evaluation set; logs some responses."""
  sync.check_version(weights, states.step)
  row, config = {}, run.config
  for evaluator in run.evaluators:
    evaluated = evaluator(weights.params)
    first = config.run.samples_every and states.step == 0
    if first or evaluated.judged.new_failures:
      logger.samples(states.step, evaluated.shown())
    judged = evaluated.responses.judged
    if states.step == 0 and not judged.any():  # Later, this may be temporary.
      raise TrainingStopped(
        f"the reward failed on all {judged.size} responses of step 0:"
        f" {run.judge.failure}"
      )
    tries = *config.eval.pass_k, config.eval.samples
    results = evaluated.results(tries)
    if config.eval.greedy:
      greedy = evaluator.greedy()(weights.params)
      results["greedy"] = greedy.results([])["avg@1"]
    row |= {f"eval/{evaluator.name}/{k}": float(x) for k, x in results.items()}
  best = config.checkpoint.best
  # Later, answers or verdicts may be missing only temporarily.
  if best and best not in row and states.step == 0:
    raise InputError(
      f"config.checkpoint.best={best!r} must be one of {', '.join(row)}"
    )
  return row
