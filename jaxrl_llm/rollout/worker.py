"""The rollout worker: prompts in, judged responses out (steps 1 to 3).

A schedule (`RolloutSettings`) is three independent choices: when a sampler call
stops, which groups count, and how many new tokens a response may get. DAPO
keeps groups with mixed verdicts, APRIL stops when enough groups have ended, and
T-PPO samples a window of every response.

The state holds every response that has begun and not been handed over. Weights
and KV caches are not part of the state: they can be rebuilt at any time without
changing the tokens.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np

from jaxrl_llm import sampling
from jaxrl_llm.data.prompt_source import PromptSource, PromptSourceState
from jaxrl_llm.data.replay import Replay
from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.groups import GroupReward
from jaxrl_llm.rewards.judge import Judged, join_judged
from jaxrl_llm.rollout.metrics import (
  conversation_metrics,
  decoding_metrics,
  partial_metrics,
  rollout_metrics,
  source_metrics,
)
from jaxrl_llm.rollout.records import (
  Arrived,
  Batch,
  Collected,
  RolloutState,
  count_groups,
  sample_ids,
)
from jaxrl_llm.rollout.schedule import STOPS, RolloutSettings, too_few
from jaxrl_llm.rollout.writer import ResponseWriter, Weights
from jaxrl_llm.types import (
  Origin,
  Responses,
  Rollout,
  Status,
  is_demonstrated,
  is_over,
  join_rows,
  mixed,
  take_rows,
  too_old,
  unjudged,
)


@dataclasses.dataclass(frozen=True, eq=False)
class RolloutWorker:
  """Samples and judges responses.

  Attributes:
    writer: samples and judges responses.
    source: draws prompts, and looks up the prompts of unfinished responses.
    settings: the schedule.
    group_reward: replaces the verdicts of each group.
    replay: adds earlier groups to each batch.
    stages: functions (collection, batch) -> batch of complete groups, in order.
      A response is left out by its verdict, `judged`, and added ones have
      negative sample ids.
  """

  writer: ResponseWriter
  source: PromptSource
  settings: RolloutSettings
  group_reward: GroupReward | None = None
  replay: Replay | None = None
  stages: Sequence[Callable[["Collection", Responses], Responses]] = ()

  def init(self) -> RolloutState:
    """Returns the state before the first batch."""
    return RolloutState(samples=0, store=None)

  def abstract(self) -> RolloutState:
    """Returns the structure of the state in a checkpoint; cf. `Learner`."""
    return RolloutState(
      samples=0, store=Rollout, conversations={}, replay=Responses
    )

  def close(self) -> None:
    """Stops the processes that run environments and the group reward."""
    self.writer.close()
    if self.group_reward is not None:
      self.group_reward.close()

  def collect(
    self,
    state: RolloutState,
    source_state: PromptSourceState,
    weights: Weights,
    timer: Any,
    arrived: Arrived | None = None,
  ) -> Collected:
    """Collects the next batch.

    Args:
      state: the worker's state.
      source_state: state of the prompt source.
      weights: weights for all new tokens.
      timer: times the phases.
      arrived: called with each group as soon as it is complete, while others
        are being sampled.

    Raises:
      TrainingStopped: Dynamic sampling found too few groups.
      InputError: A registered rule or engine ended a call too early.
    """
    before = self.writer.engine.stats
    new = Collection(self, state, source_state, weights, timer)
    if arrived is not None:
      batch = new.streamed(arrived)
    else:
      batch = new.windows() if self.settings.window else new.groups()
    self._check_each_once(state, new, batch)
    state, source_state = new.state, new.source_state
    kept, judged = sample_ids(state.store), None
    if new.judged:
      every = join_judged(new.judged)
      ids = every.responses.rollout.sample_id
      # Surplus groups are judged again in the step that trains on them.
      judged = take_rows(every.responses, ~np.isin(ids, kept))
      source_state = self.source.observe(source_state, judged)
    row = rollout_metrics(batch, judged)
    row |= decoding_metrics(self.writer.engine.stats - before) | new.metrics
    if judged is not None and self.source.has_several_sources:
      sources = (prompt.source for prompt in every.prompts)
      row |= source_metrics(judged, dict(zip(ids.tolist(), sources)))
    if talks := state.conversations:
      row |= conversation_metrics(judged, talks)
      left = map(str, kept)
      state = state.replace(conversations={i: talks[i] for i in left})
    batch = Batch(responses=batch, version=weights.version, metrics=row)
    return Collected(batch, state, source_state, new.judged)

  def _check_each_once(
    self, before: RolloutState, new: "Collection", batch: Responses
  ) -> None:
    """Checks that each response is handed over or kept, exactly once.

    Unfinished responses of the batch are kept as well, and dynamic sampling
    discards some of the responses that it has judged.

    Raises:
      RuntimeError: Responses are missing or duplicated, which is a bug.
    """
    kept = sample_ids(new.state.store)
    fresh = np.arange(before.samples, new.state.samples)
    begun = np.append(sample_ids(before.store), fresh)
    new_rows = take_rows(batch.rollout, batch.rollout.sample_id >= 0)
    handed, over = new_rows.sample_id, is_over(new_rows)
    found = [*handed[over], *kept]
    if self.settings.dynamic_sampling:
      judged = {i for x in new.judged for i in x.responses.rollout.sample_id}
      found += judged.difference(handed, kept)
    unfinished = set(handed[~over])
    if (
      not np.array_equal(np.sort(found), np.sort(begun))
      or not unfinished.issubset(kept)
      or len(unfinished) < (~over).sum()
    ):
      raise RuntimeError(
        f"{len(begun)} responses were begun, but {len(found)} are handed over,"
        f" kept or discarded, {len(set(found))} of them distinct"
      )

  def prompts_of(self, rollout: Rollout) -> Sequence[Prompt]:
    """Looks up the prompt of every row, which may be from an earlier batch."""
    rows = list(zip(rollout.example_id.tolist(), rollout.group_id.tolist()))
    prompts = {row: self.source.prompt(*row) for row in set(rows)}
    return [prompts[row] for row in rows]


@dataclasses.dataclass
class Collection:
  """A batch being collected; `groups`, `streamed` and `windows` return it.

  Attributes:
    worker: the worker.
    state: state of the worker so far.
    source_state: state of the prompt source so far.
    weights: weights for all new tokens.
    timer: times the phases.
    judged: responses judged so far, one entry per call.
    metrics: metrics of the batch.
  """

  worker: RolloutWorker
  state: RolloutState
  source_state: PromptSourceState
  weights: Weights
  timer: Any
  judged: list[Judged] = dataclasses.field(default_factory=list)
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)

  def groups(self) -> Responses:
    """Collects complete groups: rounds of new ones, and then the stages."""
    settings, replay = self.worker.settings, self.worker.replay
    replayed, number = None, self.state.samples
    if replay is not None:
      self.state = self.state.replace(replay=self._fed())
      replayed = replay.draw(self.state.replay, number)
    batch, surplus = self._rounds(replay.groups if replayed else 0)
    batch = self._look_again(batch)
    if settings.stop != "all":
      # Surplus groups are kept for the next batch; staleness is allowed here.
      self._keep(surplus.rollout, self.state.store)
      self.metrics |= partial_metrics(
        batch.rollout, self.state.store, self.weights.version
      )
    if replay is not None:
      batch = self._replay(batch, replayed, number)
    for stage in self.worker.stages:
      batch = stage(self, batch)
    return batch

  def _rounds(self, fewer: int) -> tuple[Responses, Responses]:
    """Begins, writes, judges and selects groups until there are enough.

    Args:
      fewer: groups of the batch that come from elsewhere.

    Returns:
      The oldest groups, and the surplus.
    """
    settings = self.worker.settings
    kept: list[Responses] = []
    judged = passed = 0
    groups = settings.groups - fewer
    while (missing := groups - passed) > 0:
      if len(kept) == settings.max_rounds:
        raise too_few(settings, len(kept), judged, passed)
      begun = count_groups(self.state.store)
      self._begin(settings.in_flight - fewer - begun)
      store = self._write_groups(missing)
      chosen = self._complete(store, missing)
      rows = join_rows([take_rows(store, chosen)], copy=False)
      self._keep(take_rows(store, ~chosen))
      del store  # Large, and held while the responses are judged.
      judged += count_groups(rows)
      responses = self._judged_rows(rows)
      if settings.dynamic_sampling:
        responses = take_rows(responses, mixed(responses))
      kept.append(responses)
      passed += count_groups(responses.rollout)
    batch = join_rows(kept, copy=False)
    if settings.dynamic_sampling:
      self.metrics["rollout/rounds"] = float(len(kept))
      self.metrics["rollout/mixed_fraction"] = passed / judged
    surplus = batch.rollout.group >= groups
    return take_rows(batch, ~surplus), take_rows(batch, surplus)

  def _replay(
    self, batch: Responses, replayed: Responses | None, number: int
  ) -> Responses:
    """Adds stored responses to a batch, and the batch to the store."""
    replay, store = self.worker.replay, self.state.replay
    replayed = replayed or replay.complete(store, batch)
    self.state = self.state.replace(replay=replay.add(store, batch))
    count = count_groups(replayed and replayed.rollout)
    self.metrics["rollout/replayed"] = float(count)
    if replay.feed is not None:
      replay.feed.write(number, self.judged)
    return join_rows([batch, replayed])

  def streamed(self, arrived: Arrived) -> Responses:
    """Collects groups, and hands over each as soon as it is complete."""
    self._begin(self.worker.settings.groups)
    judged: list[futures.Future[Judged]] = []
    # Judges while the engine continues.
    with futures.ThreadPoolExecutor(1, "rewards") as thread:

      def hand_over(group: Rollout) -> None:
        judged.append(thread.submit(self._judge, group))
        arrived(judged[-1])

      with self.timer.phase("generate"):
        self._write_sampled(self.state.store, arrived=hand_over)
    self.judged = [future.result() for future in judged]
    self.state = self.state.replace(store=None)
    return join_rows([each.responses for each in self.judged])

  def windows(self) -> Responses:
    """Collects up to W more tokens of every response (T-PPO).

    In its successive batching, cut responses continue under the new weights,
    and new ones replace ended ones. If only some responses to a prompt fit, the
    others start in the next step.
    """
    settings = self.worker.settings
    room = settings.in_flight * settings.group_size
    free = room - len(sample_ids(self.state.store))
    self._begin(-(-max(free, 0) // settings.group_size))
    store = self.state.store
    rule = STOPS[settings.stop].responses(settings.groups * settings.group_size)
    with self.timer.phase("generate"):
      rollout = self._write_sampled(
        take_rows(store, np.s_[:room]), window=settings.window, rule=rule
      )
    # A schedule may drop responses that got no token in this window.
    new = (rollout.lengths > rollout.window_start) | is_over(rollout)
    fresh = take_rows(rollout, new)
    over = is_over(fresh)
    batch = join_rows([unjudged(take_rows(fresh, ~over))])
    if over.any():
      self.judged.append(self._judge(take_rows(fresh, over)))
      batch = _merged(batch, self.judged[0].responses, over)
    goes_on = take_rows(rollout, rollout.status == Status.TRUNCATED)
    self._keep(goes_on, take_rows(store, np.s_[room:]))
    return batch

  def _keep(self, *parts: Rollout | None) -> None:
    """Sets the store to the rows of all parts."""
    present = [part for part in parts if len(sample_ids(part))]
    store = join_rows(present, copy=False) if present else None
    self.state = self.state.replace(store=store)

  def _begin(self, groups: int) -> None:
    """Draws prompts and adds their empty responses to the store."""
    with self.timer.phase("data"):
      prompts, self.source_state = self.worker.source.draw(
        self.source_state, max(groups, 0)
      )
    new = self._new_responses(prompts)
    self._keep(self.state.store, new)

  def _new_responses(self, prompts: Sequence[Prompt]) -> Rollout:
    """Returns empty responses to prompts, and counts them in the state."""
    state, writer = self.state, self.worker.writer
    ends = np.cumsum([state.samples, *writer.sizes(prompts)])
    ids = [np.arange(*pair) for pair in itertools.pairwise(ends)]
    # A copy, because it is updated in place.
    talks = state.conversations | writer.conversations(prompts, ids)
    self.state = state.replace(samples=int(ends[-1]), conversations=talks)
    return writer.begin(prompts, ids)

  def _write(self, rows: Rollout, **settings: Any) -> Rollout:
    """Continues unfinished responses; settings of `ResponseWriter.write`."""
    over = is_over(rows)
    if over.all():
      return rows
    written = self.worker.writer.write(
      take_rows(rows, ~over),
      self.weights,
      conversations=self.state.conversations,
      **settings,
    )
    return _merged(written, take_rows(rows, over), over)

  def _write_sampled(self, rows: Rollout, **settings: Any) -> Rollout:
    """Continues responses, none of which may be demonstrated."""
    if is_over(rows).any():
      raise InputError(
        "the prompt source demonstrates responses, but windows and streaming"
        " need sampled ones; use schedule.window=0 and schedule.streaming=False"
      )
    return self._write(rows, **settings)

  def _write_groups(self, missing: int) -> Rollout:
    """Continues the unfinished responses of the store."""
    settings, store, timer = self.worker.settings, self.state.store, self.timer
    over = is_over(store)
    ready = int(sampling.complete(over, store.group).sum())
    written = take_rows(store, ~over)
    # The oldest token of a group may be in a response that has ended.
    old = too_old(store, self.weights.version, settings.patience)
    awaited = np.flatnonzero(np.isin(np.flatnonzero(~over), old))
    rule = STOPS[settings.stop].groups(missing - ready, awaited)
    if settings.pruning is not None:
      with timer.phase("generate"):
        written = self._write(written, window=settings.pruning.at)
      with timer.phase("score"):
        self._prune(written)
    with timer.phase("generate"):
      written = self._write(written, rule=rule)
    # Train on all tokens of a response, including earlier ones.
    start = np.zeros_like(written.window_start)
    written = written.replace(window_start=start)
    ended = take_rows(store, over) if over.any() else None
    return join_rows([ended, written], copy=False)

  def _complete(self, store: Rollout, missing: int) -> np.ndarray:
    """Returns the rows of the oldest complete groups, bool [B]."""
    done = sampling.complete(is_over(store), store.group)[store.group]
    oldest = np.unique(store.group_id[done])
    if len(oldest) < missing:
      raise InputError(
        f"the sampler returned when {len(oldest)} of {missing} groups had"
        " ended; a registered rule (schedule.stop) or engine (sampler.engine)"
        " must wait for all of them"
      )
    # Dynamic sampling must judge a group to know whether it counts.
    if not self.worker.settings.dynamic_sampling:
      oldest = oldest[:missing]
    return np.isin(store.group_id, oldest)

  def _prune(self, rollout: Rollout) -> None:
    """Drops unfinished responses, in place."""
    pruning = self.worker.settings.pruning
    rows = np.flatnonzero(~is_over(rollout))
    if rows.size:
      begun = take_rows(rollout, rows)
      drop = pruning.drop(begun, self.weights.read(pruning.reads, begun))
      rollout.status[rows[drop]] = int(Status.STOPPED)

  def _fed(self) -> Responses | None:
    """Returns the replay store, with new responses of other policies."""
    replay, store = self.worker.replay, self.state.replay
    if replay.feed is None:
      return store
    rollout, prompts, skipped = replay.feed.read(
      self.state.samples, store, self.worker.source, self.worker.writer
    )
    self.metrics["rollout/skipped_lines"] = float(skipped)
    if rollout is None:
      return store
    judged = self._judge(self._of_now(rollout), prompts)
    return replay.add(store, judged.responses)

  def _of_now(self, rollout: Rollout) -> Rollout:
    """Returns responses with all tokens marked as of the newest version."""
    now = np.full_like(rollout.version, self.weights.version)
    return rollout.replace(version=now)

  def _judged_rows(
    self, rows: Rollout, prompts: Sequence[Prompt] | None = None
  ) -> Responses:
    """Returns responses with verdicts; demonstrated ones are not judged."""
    given, parts = is_demonstrated(rows), []
    if given.any():
      parts.append(unjudged(self._of_now(take_rows(rows, given))))
    if not given.all():
      rows = join_rows([take_rows(rows, ~given)], copy=False)
      prompts = prompts and [prompts[i] for i in np.flatnonzero(~given)]
      self.judged.append(self._judge(rows, prompts))
      parts.append(self.judged[-1].responses)
    return join_rows(parts, copy=False)

  def _look_again(self, batch: Responses) -> Responses:
    """Adds responses to prompts that the source draws for a judged batch."""
    if not self.judged:
      return batch
    with self.timer.phase("data"):
      prompts, self.source_state = self.worker.source.again(
        self.source_state, join_judged(self.judged)
      )
    if not prompts:
      return batch
    rows = self._new_responses(prompts)
    with self.timer.phase("generate"):
      rows = self._write(rows)
    # Not looked up: these prompts may differ from those of the data.
    sizes = self.worker.writer.sizes(prompts)
    every = [p for p, size in zip(prompts, sizes) for _ in range(size)]
    more = self._judged_rows(rows, every)
    own = more.rollout.origin == Origin.POLICY
    self.metrics["rollout/again"] = float(len(more.rewards))
    tokens = (more.rollout.mask & own).sum()
    self.metrics["rollout/again_tokens"] = float(tokens)
    return join_rows([batch, more])

  def _judge(
    self, rollout: Rollout, prompts: Sequence[Prompt] | None = None
  ) -> Judged:
    """Judges responses; their prompts are looked up if none are given."""
    worker, talks = self.worker, self.state.conversations
    with self.timer.phase("reward"):
      prompts = prompts or worker.prompts_of(rollout)
      judged = worker.writer.judge(rollout, prompts, talks)
      if worker.group_reward is not None:
        judged = worker.group_reward(judged)
      return judged


def run_key(seed: int, stream: int) -> jax.Array:
  """Returns the key of an independent random stream under the run's seed."""
  return jax.random.fold_in(jax.random.key(seed), stream)


def _merged(first: Any, second: Any, in_second: np.ndarray) -> Any:
  """Merges two records; bool [B] `in_second` is True for rows of the second."""
  if not in_second.any():
    return first
  order = np.argsort(np.argsort(in_second, kind="stable"))
  return join_rows([take_rows(join_rows([first, second]), order)])
