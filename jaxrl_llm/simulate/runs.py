"""Runs of training under a schedule of rollouts, simulated step by step.

`pipelined` has the worker of real runs write batches; `asynchronous` steps the
scheduler of the engine, whose responses never wait for the end of a batch.
"""

import math
from collections.abc import Iterable

import numpy as np

from jaxrl_llm import metrics, sampling
from jaxrl_llm.rollout.pipeline import admit
from jaxrl_llm.rollout.schedule import RolloutSettings
from jaxrl_llm.rollout.worker import RolloutWorker
from jaxrl_llm.rollout.writer import Weights
from jaxrl_llm.sampling.rules import Decision, SchedulerView, SchedulingRule
from jaxrl_llm.simulate.cost import CostModel
from jaxrl_llm.simulate.engine import SimulatedEngine, SimulatedWriter
from jaxrl_llm.simulate.lengths import Requests
from jaxrl_llm.types import Rollout, ended, join_rows, too_old


def static_batches(view: SchedulerView) -> Decision:
  """A wave of S responses waits for its longest."""
  return Decision(insert=0 if np.any(view.active) else view.slots)


def pipelined(
  requests: Requests,
  cost: CostModel,
  config: sampling.EngineConfig,
  settings: RolloutSettings,
  *,
  steps: int,
  rule: SchedulingRule | None = None,
  lag: int = 0,
  streaming: bool = False,
) -> list[dict[str, float]]:
  """Batch after batch, as the worker of real runs has them written.

  Without a lag sampling and training take turns, with all devices for each.
  With one, or when groups are trained on as they arrive, each has devices of
  its own: batch b is written with the weights of version max(0, b - lag).

  Args:
    requests: lengths.
    cost: prices, with a lag those of each side.
    config: config of the engine.
    settings: schedule of the worker; dynamic sampling needs verdicts.
    steps: number of steps of training.
    rule: in place of the worker's.
    lag: updates between the weights that write a batch and those it trains.
    streaming: whether the trainer takes groups as they are complete, see
      `config.schedule.streaming`.

  Returns:
    Of each step the engine's `EngineStats` by name, and what `record` adds
    to them.

  Raises:
    ValueError: a number is out of range.
  """
  if settings.group_size != requests.lengths.shape[1]:
    raise ValueError(f"lengths {requests.lengths.shape} are not of {settings}")
  if settings.window < 0 or settings.in_flight < settings.groups:
    raise ValueError(f"window < 0 or in_flight < groups in {settings}")
  if lag < 0:
    raise ValueError(f"lag must be >= 0, got {lag}")
  log = _StepLog(requests, cost, config, settings.groups, steps, rule)
  engine = log.engine
  worker = RolloutWorker(log.writer, log.writer, settings)
  state, drawn = worker.init(), 0
  synced_s = [0.0]  # When the weights of a version reach the sampler.
  for step in range(steps):
    version = max(0, step - lag)
    waited_s = max(synced_s[version] - engine.seconds, 0.0)
    engine.seconds += waited_s
    arrivals: list[tuple[float, Rollout]] = []
    weights, timer = Weights(object(), version), metrics.PhaseTimer()
    arrived = lambda judged, arrivals=arrivals: arrivals.append(
      (engine.seconds, judged.result().responses.rollout)
    )
    collected = worker.collect(
      state, drawn, weights, timer, arrived if streaming else None
    )
    state, drawn = collected.state, collected.source_state
    batch = collected.batch.responses.rollout
    trained_s = synced_s[-1]
    for arrived_s, group in arrivals or [(engine.seconds, batch)]:
      trained_s = max(trained_s, arrived_s) + log.train_s(group, steps=0)
    synced_s.append(trained_s + cost.train_step_s + cost.sync_s)
    rest = [] if state.store is None else [state.store]
    if not (lag or streaming):
      engine.seconds, waited_s = synced_s[-1], 0.0
    log.record(batch, step, rest, waited_s, synced_s[-1], late=version < step)
  return log.rows


def asynchronous(
  requests: Requests,
  cost: CostModel,
  config: sampling.EngineConfig,
  *,
  groups: int,
  steps: int,
  lag: float,
) -> list[dict[str, float]]:
  """Sampling and training side by side, each on its own devices.

  The trainer takes some groups as soon as so many have ended. New weights reach
  the sampler at its next step: responses are interrupted, prefilled again and
  go on, so one response may hold tokens of several versions. No trained token
  is older than `lag` steps: no more is begun than `admit` says, and the trainer
  waits for those that would grow older.

  Args:
    requests: lengths.
    cost: prices of each side.
    config: config of the engine.
    groups: groups per training step.
    steps: number of steps of training.
    lag: steps that a token may be late; `math.inf` is not bounded.

  Reference:
    Fu et al. 2025, AReaL, arXiv 2505.24298.
  """
  if lag < 0:
    raise ValueError(f"lag must be >= 0, got {lag}")
  log = _StepLog(requests, cost, config, groups, steps)
  engine, writer = log.engine, log.writer
  # Groups that are not trained, by number, and those of them that have ended.
  begun: dict[int, Rollout] = {}
  whole: list[int] = []
  version, drawn, batch, done_s = 0, 0, None, math.inf
  engine.set_params(object(), version)
  while version < steps:
    if batch is None and len(whole) >= groups:
      late = {n for n, x in begun.items() if too_old(x, version, lag).size}
      if late <= set(whole):
        whole.sort(key=lambda number: number not in late)
        batch = join_rows([begun.pop(number) for number in whole[:groups]])
        whole = whole[groups:]
        done_s = engine.seconds + log.train_s(batch)
    # More than fill the slots, so that the sampler sees that others wait.
    quota = admit(version, drawn, 0, batch=groups, lag=lag)
    while quota >= 1 and len(engine.requests()) < 3 * config.slots:
      begun[drawn] = writer.begin([drawn], requests.sample_ids([drawn]))
      engine.add(begun[drawn])
      drawn, quota = drawn + 1, quota - 1
    waited_s = 0.0
    if not engine.requests():
      waited_s, engine.seconds = done_s - engine.seconds, done_s
    left = {int(request.row.group_id[0]) for request in engine.step()}
    whole += [number for number in sorted(left) if ended(begun[number]).all()]
    if engine.seconds >= done_s:
      engine.seconds += cost.sync_s
      log.record(batch, version, begun.values(), waited_s, engine.seconds)
      version, batch, done_s = version + 1, None, math.inf
      # Responses are prefilled again under the new weights.
      engine.set_params(object(), version)
  return log.rows


class _StepLog:
  """The simulated sampler of a run, and the metrics of its steps."""

  def __init__(self, requests, cost, config, groups, steps, rule=None):
    if min(groups, steps) < 1:
      raise ValueError(f"groups and steps must be >= 1, got {groups}, {steps}")
    self.engine = SimulatedEngine(requests, cost, config, rule)
    self.writer = SimulatedWriter(self.engine)
    self.rows, self._cost = [], cost
    # When the weights became those of now: lengths of responses by number.
    self._start_s, self._stats, self._older = 0.0, self.engine.stats, {}

  def train_s(self, batch: Rollout, steps: int = 1) -> float:
    """Returns the training time of part of a batch and of optimizer steps."""
    work_s = self._cost.train_s(batch.prompt_lengths + batch.lengths)
    return work_s - (1 - steps) * self._cost.train_step_s

  def record(
    self,
    batch: Rollout,
    version: int,
    rest: Iterable[Rollout],
    waited_s: float,
    end_s: float,
    *,
    late: bool = False,
  ) -> None:
    """Appends the metrics of a step.

    Args:
      batch: the responses trained on.
      version: version of the weights that were trained.
      rest: responses that have begun, and are not trained or go on.
      waited_s: the sampler for the trainer.
      end_s: when the new weights were with the sampler.
      late: whether even the newest tokens are of older weights.
    """
    engine = self.engine
    stats = engine.stats - self._stats
    older = [self._older.get(number, 0) for number in batch.sample_id.tolist()]
    older = batch.lengths if late else older
    off_policy = np.maximum(older - batch.window_start, 0)
    begun = batch.version[off_policy > 0, 0]
    whole = batch.lengths[ended(batch)]
    self._older = {}
    for rollout in rest:
      self._older |= zip(rollout.sample_id.tolist(), rollout.lengths.tolist())
    capacities = [call.kv_capacity for call in engine.trace]
    row = {
      "step_s": end_s - self._start_s,
      "train_s": self.train_s(batch),
      "waited_s": waited_s,
      "trained": int((batch.lengths - batch.window_start).sum()),  # Tokens.
      "off_policy": int(off_policy.sum()),  # Tokens from older weights.
      "max_staleness": int((version - begun).max(initial=0)),
      "responses": len(whole),  # Trained on as a whole.
      "response_tokens": int(whole.sum()),  # Theirs.
      "parked": sum(self._older.values()),  # Tokens of the rest.
      "kv_capacity": max(capacities, default=0),
    }
    self.rows.append(stats._asdict() | row)
    self._start_s, self._stats = end_s, engine.stats
    engine.trace.clear()
