"""Simulates training runs under a rollout schedule, step by step.

`pipelined` collects batches with the worker of real runs; `asynchronous` steps
the engine's scheduler, so that responses never wait for the end of a batch.
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
from jaxrl_llm.tools.simulate.cost import CostModel
from jaxrl_llm.tools.simulate.engine import SimulatedEngine, SimulatedWriter
from jaxrl_llm.tools.simulate.lengths import Requests
from jaxrl_llm.types import Rollout, ended, join_rows, too_old


def static_batches(view: SchedulerView) -> Decision:
  """Inserts requests only when all S slots are free (static batching)."""
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
  """Simulates a run that samples batch by batch, with the worker of real runs.

  Without a lag, sampling and training alternate on all devices. With a lag, or
  when groups are trained on as they arrive, each has separate devices: batch b
  is sampled with the weights of version max(0, b - lag).

  Args:
    requests: lengths of prompts and responses.
    cost: prices; with a lag, those of the separate devices.
    config: config of the engine.
    settings: schedule of the worker; dynamic sampling is not supported, as it
      needs verdicts.
    steps: number of training steps.
    rule: scheduling rule that overrides the worker's.
    lag: updates between the weights that sample a batch and those it trains.
    streaming: whether the trainer takes groups as they complete, see
      `config.schedule.streaming`.

  Returns:
    Per step, the engine's `EngineStats` by name, and the metrics of `record`.
  """
  log = _StepLog(SimulatedEngine(requests, cost, config, rule))
  engine = log.engine
  worker = RolloutWorker(log.writer, log.writer, settings)
  state, drawn = worker.init(), 0
  synced_s = [0.0]  # Times when the sampler gets the weights of each version.
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
      trained_s = max(trained_s, arrived_s)
      trained_s += log.train_s(group) - cost.train_step_s
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
  """Simulates a run that samples and trains concurrently on separate devices.

  The trainer takes a batch as soon as `groups` groups have ended. New weights
  reach the sampler at its next step: responses are interrupted, prefilled again
  and continued, so a response may contain tokens of several versions. No
  trained token is older than `lag` steps: `admit` limits the groups that are
  started, and the trainer waits for groups that would become too old.

  Args:
    requests: lengths of prompts and responses.
    cost: prices on the separate devices.
    config: config of the engine.
    groups: groups per training step.
    steps: number of training steps.
    lag: maximum age of a trained token in steps; `math.inf`: unbounded.

  Reference:
    Fu et al. 2025, AReaL, arXiv 2505.24298.
  """
  log = _StepLog(SimulatedEngine(requests, cost, config))
  engine, writer = log.engine, log.writer
  # Untrained groups by number, and the numbers of those that have ended.
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
    # More requests than slots, so that the scheduler always sees a queue.
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
  """Simulated sampler of a run, and the metrics of its steps."""

  def __init__(self, engine: SimulatedEngine):
    self.engine, self.writer = engine, SimulatedWriter(engine)
    self.rows = []
    # At the last weight update: time, counters, and lengths by sample id.
    self._start_s, self._stats, self._older = 0.0, self.engine.stats, {}

  def train_s(self, batch: Rollout) -> float:
    """Returns the seconds of an update on a batch."""
    return self.engine.cost.train_s(batch.prompt_lengths + batch.lengths)

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
      rest: responses that have started but are untrained or unfinished.
      waited_s: seconds that the sampler waited for the trainer.
      end_s: time when the sampler got the new weights.
      late: whether even the newest tokens are from older weights.
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
      "responses": len(whole),  # Ended responses.
      "response_tokens": int(whole.sum()),  # Tokens of ended responses.
      "parked": sum(self._older.values()),  # Tokens of `rest`.
      "kv_capacity": max(capacities, default=0),
    }
    self.rows.append(stats._asdict() | row)
    self._start_s, self._stats = end_s, engine.stats
    engine.trace.clear()
