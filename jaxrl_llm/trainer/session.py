"""The surroundings of training: folder, signals, checkpoints and logs."""

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
from jaxrl_llm.errors import TrainingStopped
from jaxrl_llm.system import processes, signals
from jaxrl_llm.system.processes import of_first
from jaxrl_llm.trainer import speed, summary
from jaxrl_llm.trainer.bounds import bounds
from jaxrl_llm.trainer.iteration import check_sampler
from jaxrl_llm.trainer.run import Run, States, restore, save
from jaxrl_llm.trainer.value_pretraining import CHECKPOINTS
from jaxrl_llm.trainer.workdir import Workdir
from jaxrl_llm.workdir import ROWS, best_step, describe


class Session(contextlib.ExitStack):
  """A run in its folder; `loop.train` describes its arguments.

  Signals are noticed, and the folder is held, while the context is entered. If
  an error leaves it after `begin`, the last complete step is saved.

  Attributes:
    is_complete: whether the run is at its last step already.
    restored: states and weights of a checkpoint; None for a new run.
    logger: logs rows and events.
    timer: times the phases of training.
    stopped: the signal that stops the run.
  """

  def __init__(
    self,
    run: Run,
    workdir: str | os.PathLike,
    step: int | None,
    begun: float | None,
  ):
    super().__init__()
    self._run, self._step = run, step
    self.folder = Workdir(pathlib.Path(workdir))
    self._begun = time.perf_counter() if begun is None else begun
    self._states: States | None = None  # After `begin`: can be saved.
    self._unjudged = 0  # Consecutive batches without any verdict.
    self._fails = False  # Too many of them.

  def __enter__(self) -> "Session":
    run, config, folder = self._run, self._run.config, self.folder
    metrics.check_trackers(config.run.trackers)
    with contextlib.ExitStack() as stack:
      stack.enter_context(contextlib.closing(run.judge))
      stack.enter_context(contextlib.closing(run.worker))
      self.stopped = stack.enter_context(signals.stop_on_signal())
      stack.enter_context(folder.held())
      self._changes = folder.changes(config)
      self._found = folder.steps(self._step)
      self._saver = checkpoint.Checkpointer(
        folder.path / "checkpoints",
        keep=config.checkpoint.keep,
        keep_every=config.checkpoint.keep_every,
        best=functools.partial(best_step, folder.path, config.checkpoint.best),
      )
      stack.enter_context(contextlib.closing(self._saver))
      stack.enter_context(processes.ended_together())
      last = self._found[-1] if self._found else -1
      self.is_complete = last >= config.run.steps
      if self.is_complete:
        print(
          f"the run is at its last step {last}; raise run.steps to continue"
        )
      self.push(stack.pop_all().__exit__)
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
    failed = isinstance(error, (Exception, SystemExit))
    failed &= not isinstance(error, (TrainingStopped, sync.SyncError))
    # Several processes do not fail together, and cannot save together. Arrays
    # of a step that failed half-way cannot be saved either.
    if self._states is not None and failed and jax.process_count() == 1:
      with contextlib.suppress(Exception):
        self._save_last(self._states)
        self.logger.event(
          f"an error; step {self._saver.latest_step()} is saved"
        )
    return super().__exit__(kind, error, trace)

  def open(self) -> None:
    """Restores the newest undamaged checkpoint, and opens the logger."""
    run, folder, found = self._run, self.folder, self._found
    last, config = -1, run.config
    self.restored, events = checkpoint.newest_undamaged(
      found, functools.partial(restore, run, self._saver)
    )
    if self.restored:
      last = self.restored[0].step
      facts = self._saver.record(last, "facts")["facts"]
      events += folder.check_facts(last, facts, run.inputs, self._changes)
    # Before the logger, which truncates rows after the checkpoint.
    events.append(folder.set_aside(last))
    events += folder.drop_damaged_rows()
    if found:
      events += folder.repair(config)
      folder.record(last, self._changes)
    elif not folder.begin(config):
      # Left by a run with other settings.
      self._drop_pretraining()
    replay = run.worker.replay
    if replay is not None and replay.feed is not None:
      replay.feed.run = folder.run_id()
    self.logger = self.enter_context(
      _make_logger(run, folder, self._saver, last)
    )
    run.judge.tell = self.logger.event
    events += [*run.notes, *(one.origin for one in run.evaluators)]
    for line in filter(None, (*summary.describe(run), *events)):
      self.logger.event(line)

  def timer_of_the_start(self) -> metrics.PhaseTimer:
    """Returns a timer whose phase `start` began with the program."""
    spent = {"start": time.perf_counter() - self._begun}
    return metrics.PhaseTimer(on_enter=self.logger.phase, spent=spent)

  def begin(self, states: States) -> None:
    """Begins training; a checkpoint then has the states."""
    run, spent = self._run, {}
    if self.restored:
      # The parity error is already in the row of that step.
      check_sampler(run, *self.restored)
      self.logger.event(f"resumed from step {states.step}")
      for line in describe(self._changes):
        self.logger.event(line)
      spent = {"spent": {"start": time.perf_counter() - self._begun}}
    self.restored = None  # The first step donates its arrays.
    self.timer = metrics.PhaseTimer(
      compiles=metrics.CompileCounter(),
      waited=processes.waited_s,
      on_enter=self.logger.phase,
      **spent,
    )
    if not self._found:
      self._save_last(states)
    if of_first(self._saver.latest_step) is not None:
      self._drop_pretraining()
    # All rows so far, so that a resumed run gives the same warnings.
    rows = of_first(metrics.read_rows, self.folder.path / ROWS)
    rules = metrics.RULES | bounds(run.config, run.learner)
    self._health = metrics.Health(rows, rules)
    self._unjudged = functools.reduce(_unjudged_in_a_row, rows, 0)
    self._states = states

  def goes_on(self, states: States) -> bool:
    """Returns whether there is another step, and prepares for it."""
    last = self._run.config.run.steps
    if self._fails or states.step >= last or self.stopped.agreed():
      return False
    self.folder.check()
    self.stopped.doing = f"step {states.step + 1}"
    return True

  def evaluates(self, step: int) -> bool:
    """Returns whether a step is followed by an evaluation."""
    config = self._run.config
    return step % config.eval.every == 0 or step == config.run.steps

  def log(self, states: States, row: dict[str, float]) -> None:
    """Completes the row of a step, and logs it and warnings about it."""
    run, logger, saver = self._run, self.logger, self._saver
    row |= self.timer.collect()
    for line in saver.new_errors():
      logger.event(line)
    row |= speed.speed(run.learner, row) | {
      "memory/peak_gib": metrics.peak_memory_gib(),
      "checkpoint/failures": saver.failures,
    }
    row |= logger.more()
    holds, warnings = self._health.check(states.step, row)
    row |= holds
    # Log first: a checkpoint guarantees that its row is on disk. The time of a
    # save is therefore in the next row.
    logger.log(states.step, row)
    for warning in warnings:
      logger.event(warning)
    if "host/suspect" in row and run.config.run.on_suspect == "stop":
      self.stopped.signal = self.stopped.signal or signals.SUSPECT
    self._unjudged = _unjudged_in_a_row(self._unjudged, row)
    self._fails = self._unjudged >= run.config.run.max_skipped
    self._states = states

  def save_if_due(self, states: States, row: Mapping[str, float]) -> None:
    """Starts to save a step for which a checkpoint is due."""
    settings, step = self._run.config.checkpoint, states.step
    if step % settings.every == 0 or (
      settings.best in row
      and of_first(best_step, self.folder.path, settings.best) == step
    ):
      with self.timer.phase("checkpoint"):
        self._save(states)

  def finish(self, states: States) -> int:
    """Saves the last step; returns 0, or the signal that stopped the run.

    Raises:
      TrainingStopped: The last step cannot be saved, or the reward failed in
        too many batches.
    """
    self._states = None
    self._save_last(states)
    saver, step = self._saver, states.step
    if of_first(saver.latest_step) != step:
      errors = of_first(saver.new_errors)
      raise TrainingStopped(f"{errors[-1]}; resume with the same --workdir")
    if self._fails:
      raise TrainingStopped(
        f"the reward failed on all responses of {self._unjudged} batches in a"
        f" row, up to step {step}, which was saved: {self._run.judge.failure};"
        " fix the reward and resume with the same --workdir"
      )
    if step >= self._run.config.run.steps:
      rows = of_first(metrics.read_rows, self.folder.path / ROWS)
      for line in summary.reached(rows, self.folder.path):
        self.logger.event(line)
      return 0
    self.logger.event(
      f"stopped by {signals.name(self.stopped.signal)} at step {step}, saved;"
      " rerun with the same --workdir to continue"
    )
    return self.stopped.signal

  def _drop_pretraining(self) -> None:
    shutil.rmtree(self.folder.path / CHECKPOINTS, ignore_errors=True)

  def _save(self, states: States) -> None:
    facts = self.folder.facts(self._run.config, self._run.inputs)
    save(states, self._saver, facts)

  def _save_last(self, states: States) -> None:
    """Saves the states, unless the last checkpoint has them."""
    with self.timer.phase("checkpoint"):
      self._saver.wait()
      if of_first(self._saver.latest_step) != states.step:
        self._save(states)
        self._saver.wait()


def _make_logger(
  run: Run, folder: Workdir, saver: checkpoint.Checkpointer, last_step: int
) -> metrics.PhaseLogger:
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


def _unjudged_in_a_row(before: int, row: Mapping[str, float]) -> int:
  """Counts consecutive batches without any verdict, including this row."""
  if "reward/errors" not in row:  # No response has ended.
    return before
  return 0 if "reward/mean" in row else before + 1
