"""The rollout worker: prompts in, judged responses out (steps 1 to 3).

A schedule (`RolloutSettings`) is three independent choices: when a call of the
sampler stops, which groups count, and how many new tokens a response may get.
DAPO keeps groups with mixed verdicts, APRIL stops when enough groups have
ended, T-PPO samples a window of every response.

The state holds every response that has begun and was not handed over. Weights
and KV caches are not part of the state: they can be rebuilt at any time without
changing the tokens.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np

from jaxrl_llm import sampling
from jaxrl_llm.data.prompt_source import PromptSource, PromptSourceState
from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.rewards.groups import GroupReward
from jaxrl_llm.rewards.judge import Judged, join_judged
from jaxrl_llm.rollout.metrics import (
  conversation_metrics,
  decoding_metrics,
  partial_metrics,
  per_response,
  rollout_metrics,
  source_metrics,
)
from jaxrl_llm.rollout.records import Arrived, Batch, Collected, RolloutState
from jaxrl_llm.rollout.replay import Replay
from jaxrl_llm.rollout.schedule import STOPS, RolloutSettings, too_few
from jaxrl_llm.rollout.turns import Conversations
from jaxrl_llm.rollout.writer import ResponseWriter, Weights
from jaxrl_llm.types import (
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
    source: draws prompts, and looks up those of unfinished responses.
    settings: the schedule.
    group_reward: replaces the verdicts of each group.
    replay: adds earlier groups to each batch.
  """

  writer: ResponseWriter
  source: PromptSource
  settings: RolloutSettings
  group_reward: GroupReward | None = None
  replay: Replay | None = None

  def init(self) -> RolloutState:
    """The state before the first batch."""
    return RolloutState(samples=0, store=None)

  def abstract(self) -> RolloutState:
    """The state as a checkpoint is read into it, see `Learner.abstract`."""
    return RolloutState(
      samples=0, store=Rollout, conversations={}, replay=Responses
    )

  def close(self) -> None:
    """Ends the processes that environments and the group reward run in."""
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
    """
    engine = self.writer.engine
    before = engine.stats
    collect = self._windows if self.settings.window else self._groups
    if arrived is not None:
      collect = functools.partial(self._streamed, arrived)
    collected = collect(state, source_state, weights, timer)
    self._check_each_once(state, collected)
    batch, state = collected.batch, collected.state
    kept = sample_ids(state.store)
    judged = per_response([x.responses for x in collected.judged], kept)
    source_state = collected.source_state
    if collected.judged:
      told = join_judged(collected.judged).responses
      # Surplus groups are judged again in the step that trains on them.
      new = ~np.isin(told.rollout.sample_id, kept)
      source_state = self.source.observe(source_state, take_rows(told, new))
    row = rollout_metrics(batch.responses, judged)
    row |= decoding_metrics(engine.stats - before) | batch.metrics
    if judged is not None and self.source.has_several_sources:
      sources = {
        i: prompt.source
        for each in collected.judged
        for i, prompt in zip(sample_ids(each.responses.rollout), each.prompts)
      }
      row |= source_metrics(judged, sources)
    if talks := state.conversations:
      row |= conversation_metrics(judged, talks)
      left = map(str, kept)
      state = state.replace(conversations={i: talks[i] for i in left})
    batch = dataclasses.replace(batch, metrics=row)
    return dataclasses.replace(
      collected, batch=batch, state=state, source_state=source_state
    )

  def _check_each_once(self, before: RolloutState, new: Collected) -> None:
    """Checks that each response begun is handed over or kept, exactly once.

    Unfinished responses of the batch are kept as well, and dynamic sampling
    discards responses that it has judged.

    Raises:
      RuntimeError: Some are missing or doubled, which is a bug.
    """
    batch, kept = new.batch.responses, sample_ids(new.state.store)
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
        f" kept or discarded, {len(set(found))} of them different"
      )

  def _groups(self, state, source_state, weights, timer) -> Collected:
    """Collects whole groups, oldest first."""
    settings = self.settings
    kept: list[Responses] = []
    seen: list[Judged] = []
    judged = passed = 0
    replayed, fewer, number = None, 0, state.samples
    if self.replay is not None:
      state = state.replace(replay=self._fed(state, weights, timer))
      replayed = self.replay.draw(state.replay, state.samples)
      fewer = self.replay.groups if replayed else 0
    groups = settings.groups - fewer
    while (missing := groups - passed) > 0:
      if len(kept) == settings.max_rounds:
        raise too_few(settings, len(kept), judged, passed)
      begun = _count_groups(state.store)
      state, source_state = self._begin(
        state, source_state, settings.in_flight - fewer - begun, timer
      )
      store = self._write_groups(state, missing, weights, timer)
      done = sampling.complete(is_over(store), store.group)[store.group]
      # Dynamic sampling must judge a group to know whether it counts.
      wanted = None if settings.dynamic_sampling else missing
      oldest = np.unique(store.group_id[done])[:wanted]
      chosen = np.isin(store.group_id, oldest)
      rows = join_rows([take_rows(store, chosen)])
      responses, found = self._judged_rows(rows, state, weights, timer)
      seen += found
      if settings.dynamic_sampling:
        responses = take_rows(responses, mixed(responses))
      kept.append(responses)
      judged += oldest.size
      passed += _count_groups(responses.rollout)
      state = state.replace(store=_joined(take_rows(store, ~chosen)))
    batch = join_rows(kept)
    surplus = batch.rollout.group >= groups
    row = {}
    if settings.dynamic_sampling:
      row["rollout/rounds"] = float(len(kept))
      row["rollout/mixed_fraction"] = passed / judged
    rest, batch = take_rows(batch, surplus), take_rows(batch, ~surplus)
    more, state, source_state = self._second_look(
      state, source_state, seen, weights, timer
    )
    if more is not None:
      seen.append(more)
      batch = join_rows([batch, more.responses])
      row["rollout/again"] = float(len(more.texts))
      row["rollout/again_tokens"] = float(more.responses.rollout.mask.sum())
    if settings.stop != "all":
      # Surplus groups are kept for the next batch; staleness is allowed here.
      state = state.replace(store=_joined(rest.rollout, state.store))
      row |= partial_metrics(batch.rollout, state.store, weights.version)
    if self.replay is not None:
      state = state.replace(replay=self.replay.add(state.replay, batch))
      batch = join_rows([batch, replayed])
      row["rollout/replayed"] = float(fewer)
      if self.replay.feed is not None:
        self.replay.feed.write(number, seen)
    batch = Batch(responses=batch, version=weights.version, metrics=row)
    return Collected(batch, state, source_state, seen)

  def _fed(self, state, weights, timer) -> Responses | None:
    """Returns the replay store with new responses of other policies."""
    feed, store, found = self.replay.feed, state.replay, None
    if feed is not None:
      found = feed.read(state.samples, store, self.source, self.writer)
    if found is None:
      return store
    rollout, prompts = found
    now = np.full_like(rollout.version, weights.version)
    judged = self._judge(rollout.replace(version=now), {}, timer, prompts)
    return self.replay.add(store, judged.responses)

  def _judged_rows(self, rows, state, weights, timer):
    """Returns responses with verdicts, and those that were judged."""
    given, parts, seen = is_demonstrated(rows), [], []
    if given.any():  # The data vouch for them.
      known = take_rows(rows, given)
      now = np.full_like(known.version, weights.version)
      parts.append(unjudged(known.replace(version=now)))
    if not given.all():
      written = join_rows([take_rows(rows, ~given)])
      seen.append(self._judge(written, state.conversations, timer))
      parts.append(seen[0].responses)
    return join_rows(parts), seen

  def _second_look(self, state, source_state, seen, weights, timer):
    """Samples and judges what the prompt source draws for a judged batch."""
    if not seen:
      return None, state, source_state
    with timer.phase("data"):
      judged = join_judged(seen)
      prompts, source_state = self.source.again(source_state, judged)
    if not prompts:
      return None, state, source_state
    rows, state = self._new_responses(state, prompts)
    talks, sizes = state.conversations, self.writer.sizes(prompts)
    with timer.phase("generate"):
      rows = self.writer.write(rows, weights, conversations=talks)
    rows = rows.replace(window_start=np.zeros_like(rows.window_start))
    # Not looked up: these prompts may differ from those of their examples.
    prompts = [p for p, size in zip(prompts, sizes) for _ in range(size)]
    return self._judge(rows, talks, timer, prompts), state, source_state

  def _streamed(
    self, arrived, state, source_state, weights, timer
  ) -> Collected:
    """Collects whole groups, and hands over each when it is complete."""
    state, source_state = self._begin(
      state, source_state, self.settings.groups, timer
    )
    judged: list[futures.Future[Judged]] = []
    # Judges while the engine continues.
    with futures.ThreadPoolExecutor(1, "rewards") as thread:

      def hand_over(group: Rollout) -> None:
        judged.append(
          thread.submit(self._judge, group, state.conversations, timer)
        )
        arrived(judged[-1])

      talks = state.conversations
      with timer.phase("generate"):
        self.writer.write(
          state.store, weights, conversations=talks, arrived=hand_over
        )
    seen = [future.result() for future in judged]
    responses = join_rows([each.responses for each in seen])
    batch = Batch(responses=responses, version=weights.version, metrics={})
    return Collected(batch, state.replace(store=None), source_state, seen)

  def _windows(self, state, source_state, weights, timer) -> Collected:
    """T-PPO's successive batching: up to W more tokens of every response.

    Cut responses continue under the new weights, and new ones replace ended
    ones. If only some responses of a prompt fit, the others start in the
    next step.
    """
    settings = self.settings
    room = settings.in_flight * settings.group_size
    free = room - (0 if state.store is None else len(state.store.lengths))
    state, source_state = self._begin(
      state, source_state, -(-max(free, 0) // settings.group_size), timer
    )
    rule = STOPS[settings.stop].responses(settings.groups * settings.group_size)
    with timer.phase("generate"):
      rollout = self.writer.write(
        take_rows(state.store, np.s_[:room]),
        weights,
        window=settings.window,
        rule=rule,
        conversations=state.conversations,
      )
    fresh = take_rows(rollout, rollout.lengths > rollout.window_start)
    over, seen = is_over(fresh), []
    batch = join_rows([unjudged(take_rows(fresh, ~over))])
    if over.any():
      over_rows = take_rows(fresh, over)
      seen = [self._judge(over_rows, state.conversations, timer)]
      batch = _merged(batch, seen[0].responses, over)
    goes_on = take_rows(rollout, rollout.status == Status.TRUNCATED)
    waiting = take_rows(state.store, np.s_[room:])
    state = state.replace(store=_joined(goes_on, waiting))
    batch = Batch(responses=batch, version=weights.version, metrics={})
    return Collected(batch, state, source_state, seen)

  def _begin(self, state, source_state, groups, timer):
    """Draws prompts and adds their empty responses to the store."""
    with timer.phase("data"):
      prompts, source_state = self.source.draw(source_state, max(groups, 0))
    new, state = self._new_responses(state, prompts)
    return state.replace(store=_joined(state.store, new)), source_state

  def _new_responses(
    self, state: RolloutState, prompts: Sequence[Prompt]
  ) -> tuple[Rollout, RolloutState]:
    """Returns empty responses to prompts, and the state that counts them."""
    ends = np.cumsum([state.samples, *self.writer.sizes(prompts)])
    ids = [np.arange(*pair) for pair in itertools.pairwise(ends)]
    new = self.writer.conversations(prompts, ids)
    # A copy, because it is updated in place.
    talks, samples = state.conversations | new, int(ends[-1])
    state = state.replace(samples=samples, conversations=talks)
    return self.writer.begin(prompts, ids), state

  def _write_groups(self, state, missing, weights, timer) -> Rollout:
    """Continues the unfinished responses of the store."""
    settings, store = self.settings, state.store
    over = is_over(store)
    ready = int(sampling.complete(over, store.group).sum())
    unfinished = take_rows(store, ~over)
    awaited = too_old(unfinished, weights.version, settings.patience)
    rule = STOPS[settings.stop].groups(missing - ready, awaited)
    if over.all():
      with timer.phase("generate"):  # Every step has this phase.
        return store
    write = functools.partial(
      self.writer.write, weights=weights, conversations=state.conversations
    )
    written = unfinished
    if settings.pruning is not None:
      with timer.phase("generate"):
        written = write(unfinished, window=settings.pruning.at)
      with timer.phase("score"):
        self._prune(written, weights)
    done = is_over(written)
    with timer.phase("generate"):
      if not done.all():
        ended = take_rows(written, done)
        written = write(take_rows(written, ~done), rule=rule)
        written = _merged(written, ended, done) if done.any() else written
    # Train on all tokens of a response, including earlier ones.
    start = np.zeros_like(written.window_start)
    written = written.replace(window_start=start)
    return join_rows([take_rows(store, over), written])

  def _prune(self, rollout: Rollout, weights: Weights) -> None:
    """Gives up unfinished responses, in place."""
    rows = np.flatnonzero(~is_over(rollout))
    if rows.size:
      begun, pruning = take_rows(rollout, rows), self.settings.pruning
      drop = pruning.drop(begun, weights.read(pruning.reads, begun))
      rollout.status[rows[drop]] = int(Status.STOPPED)

  def _judge(
    self,
    rollout: Rollout,
    conversations: Conversations,
    timer: Any,
    prompts: Sequence[Prompt] | None = None,
  ) -> Judged:
    with timer.phase("reward"):
      prompts = prompts or self._prompts_of(rollout)
      judged = self.writer.judge(rollout, prompts, conversations)
      if self.group_reward is not None:
        judged = self.group_reward(judged)
      return judged

  def _prompts_of(self, rollout: Rollout) -> Sequence[Prompt]:
    """Looks up the prompt of every row, which may be of an earlier batch."""
    rows = list(zip(rollout.example_id.tolist(), rollout.group_id.tolist()))
    prompts = {row: self.source.prompt(*row) for row in set(rows)}
    return [prompts[row] for row in rows]


def run_key(seed: int, stream: int) -> jax.Array:
  """Returns the key of an independent random stream under the run's seed."""
  return jax.random.fold_in(jax.random.key(seed), stream)


def _merged(first: Any, second: Any, in_second: np.ndarray) -> Any:
  """Merges two records of rows; `in_second`, bool [B], tells their places."""
  order = np.argsort(np.argsort(in_second, kind="stable"))
  return join_rows([take_rows(join_rows([first, second]), order)])


def _joined(*parts: Rollout | None) -> Rollout | None:
  """Concatenates rows; None if there are none."""
  present = [part for part in parts if part is not None and len(part.lengths)]
  return join_rows(present) if present else None


def sample_ids(rollout: Rollout | None) -> np.ndarray:
  """Returns the sample ids of the rows, int [B]; empty for None."""
  return np.zeros(0, int) if rollout is None else rollout.sample_id


def _count_groups(rollout: Rollout | None) -> int:
  return 0 if rollout is None else len(np.unique(rollout.group_id))
