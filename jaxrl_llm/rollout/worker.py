"""The rollout worker: prompts in, judged responses out (steps 1 to 3).

How it comes by a batch is three independent choices (`RolloutSettings`): when
a call of the sampler stops, which groups count, and how many tokens a response
may get. DAPO keeps groups with mixed verdicts, APRIL stops when enough groups
have ended, T-PPO writes a window of every response.

Its state holds every response that has begun and was not handed over. Which
weights and KV caches belong to it is a cache: dropped at any moment and
rebuilt, the worker writes the same tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import chex
import jax
import numpy as np

from jaxrl_llm import metrics, sampling
from jaxrl_llm.data.prompt_source import PromptSource, PromptSourceState
from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.errors import TrainingStopped
from jaxrl_llm.rewards.judge import Judged
from jaxrl_llm.rollout.metrics import (
  conversation_metrics,
  decoding_metrics,
  per_response,
  rollout_metrics,
)
from jaxrl_llm.rollout.turns import Conversations
from jaxrl_llm.rollout.writer import ResponseWriter, Weights
from jaxrl_llm.types import (
  Responses,
  Rollout,
  Status,
  ended,
  join_rows,
  take_rows,
  unjudged,
)

_SHOWN = 4  # Responses of a step that the log may show.


class Stop(NamedTuple):
  """When a call of the sampler stops, as rules of its scheduler."""

  # (groups that are still wanted, rows that are waited for) -> rule.
  groups: Callable[[int, np.ndarray], sampling.rules.SchedulingRule]
  # (responses of a batch) -> rule, where responses are written in windows.
  responses: Callable[[int], sampling.rules.SchedulingRule]


# Name -> when to stop. After any but 'all' responses are left that go on in the
# next call.
STOPS: dict[str, Stop] = {
  "all": Stop(
    groups=lambda wanted, awaited: sampling.continuous_batching,
    responses=lambda count: sampling.continuous_batching,
  ),
  "first_groups": Stop(
    groups=lambda wanted, awaited: sampling.stop_after_groups(
      wanted, awaited=awaited
    ),
    responses=sampling.stop_after_responses,
  ),
}


@chex.dataclass(frozen=True)
class RolloutState:
  """What a worker carries from batch to batch."""

  samples: int  # Responses so far; numbers the next one.
  store: Rollout | None  # Begun and not handed over, or going on.
  # With an environment: theirs, by sample id.
  conversations: Conversations = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
  """How a worker comes by a batch; sizes are in groups of `group_size`.

  Attributes:
    groups: of a batch.
    group_size: responses of a group.
    in_flight: groups that are written at a time, at least `groups`.
    stop: when a call of the sampler stops, one of `STOPS`.
    dynamic_sampling: whether only groups with right and wrong responses count.
    window: most new tokens of a response in a step; 0 sets no bound. A batch
      is then every response that got new tokens, whether it has ended or not.
    max_staleness: updates between the first token of a response and those that
      it is trained with, at most.
    max_rounds: calls of the sampler before dynamic sampling gives up.
  """

  groups: int
  group_size: int
  in_flight: int
  stop: str = "all"
  dynamic_sampling: bool = False
  window: int = 0
  max_staleness: int = 1
  max_rounds: int = 1

  def __post_init__(self):
    if self.stop != "all" and not self.window and self.patience < 1:
      raise ValueError(
        f"max_staleness={self.max_staleness} is too little for"
        f" {self.in_flight} groups in flight of which {self.groups} are trained"
        f" at a time: it must be {1 + self.max_staleness - self.patience} or"
        " more"
      )

  @property
  def patience(self) -> int:
    """Updates after which an unfinished response is waited for.

    So many groups may have to be waited for at a time that the last of them is
    trained some updates later.
    """
    later = -(-self.in_flight // self.groups) - 2 + self.dynamic_sampling
    return self.max_staleness - max(0, later)


@chex.dataclass(frozen=True)
class Batch:
  """Judged responses on their way to the learner."""

  responses: Responses
  version: int  # Of the weights that its newest tokens were written with.
  metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Collected:
  """A batch, and the states after it."""

  batch: Batch
  state: RolloutState
  source_state: PromptSourceState
  judged: list[Judged]  # What was judged for it, a call each.

  @property
  def samples(self) -> list[metrics.Sample]:
    """A few of what was judged last, for a person."""
    if not self.judged:
      return []
    rng = np.random.default_rng(self.batch.version + 1)
    rows = rng.permutation(len(self.judged[-1].texts))[:_SHOWN]
    return metrics.make_samples(self.judged[-1], rows)

  @property
  def new_failures(self) -> list[metrics.Sample]:
    """Samples whose reward raised an error not seen before in this run."""
    return [
      sample
      for judged in self.judged
      for sample in metrics.make_samples(judged, judged.new_failures)
    ]


# Takes a group that will be judged.
Arrived = Callable[[futures.Future[Judged]], None]


class RolloutWorker:
  """Has responses written and judged.

  Attributes:
    writer: writes and judges them.
  """

  def __init__(
    self,
    writer: ResponseWriter,
    source: PromptSource,
    settings: RolloutSettings,
  ):
    """Makes the worker.

    Args:
      writer: writes and judges responses.
      source: draws prompts, and finds those of responses that go on.
      settings: how a batch comes about.
    """
    self.writer, self._source, self._settings = writer, source, settings

  def init(self) -> RolloutState:
    """The state before the first batch."""
    return RolloutState(samples=0, store=None)

  def abstract(self) -> RolloutState:
    """The state as a checkpoint is read into it, see `Learner.abstract`."""
    return RolloutState(samples=0, store=Rollout, conversations={})

  def close(self) -> None:
    """Ends the processes that environments run in."""
    self.writer.close()

  def collect(
    self,
    state: RolloutState,
    source_state: PromptSourceState,
    weights: Weights,
    timer: Any,
    arrived: Arrived | None = None,
  ) -> Collected:
    """The next batch.

    Args:
      state: before.
      source_state: where prompts are drawn from.
      weights: that everything new is written with.
      timer: times the phases.
      arrived: takes each group as soon as it is complete, while others are
        being written.

    Raises:
      TrainingStopped: dynamic sampling found too few groups.
    """
    engine = self.writer.engine
    before = engine.stats
    collect = self._windows if self._settings.window else self._groups
    if arrived is not None:
      collect = functools.partial(self._streamed, arrived)
    collected = collect(state, source_state, weights, timer)
    self._check_each_once(state, collected)
    batch, state = collected.batch, collected.state
    kept = sample_ids(state.store)
    judged = per_response([x.responses for x in collected.judged], kept)
    row = rollout_metrics(batch.responses, judged)
    row |= decoding_metrics(engine.stats - before) | batch.metrics
    if talks := state.conversations:
      row |= conversation_metrics(judged, talks)
      left = map(str, kept)
      state = state.replace(conversations={i: talks[i] for i in left})
    batch = dataclasses.replace(batch, metrics=row)
    return dataclasses.replace(collected, batch=batch, state=state)

  def _check_each_once(self, before: RolloutState, new: Collected) -> None:
    """Checks that each response begun is handed over or kept, exactly once.

    A response of the batch that has not ended is kept as well, and dynamic
    sampling discards responses that it has judged.

    Raises:
      RuntimeError: Some are missing or doubled, which is a fault of this code.
    """
    batch, kept = new.batch.responses, sample_ids(new.state.store)
    fresh = np.arange(before.samples, new.state.samples)
    begun = np.append(sample_ids(before.store), fresh)
    handed, over = batch.rollout.sample_id, batch.ended
    found = [*handed[over], *kept]
    if self._settings.dynamic_sampling:
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
    """Whole groups, the oldest first."""
    settings = self._settings
    kept: list[Responses] = []
    seen: list[Judged] = []
    judged = passed = 0
    while (missing := settings.groups - passed) > 0:
      if len(kept) == settings.max_rounds:
        raise _too_few(settings, len(kept), judged, passed)
      begun = _count_groups(state.store)
      state, source_state = self._begin(
        state, source_state, settings.in_flight - begun, timer
      )
      store = self._write_groups(state, missing, weights, timer)
      done = sampling.complete(ended(store), store.group)[store.group]
      # What counts is known of judged groups alone.
      wanted = None if settings.dynamic_sampling else missing
      oldest = np.unique(store.group_id[done])[:wanted]
      chosen = np.isin(store.group_id, oldest)
      chosen_rows = join_rows([take_rows(store, chosen)])
      seen.append(self._judge(chosen_rows, state.conversations, timer))
      responses = seen[-1].responses
      if settings.dynamic_sampling:
        responses = take_rows(responses, mixed(responses))
      kept.append(responses)
      judged += oldest.size
      passed += _count_groups(responses.rollout)
      state = state.replace(store=_joined(take_rows(store, ~chosen)))
    batch = join_rows(kept)
    surplus = batch.rollout.group >= settings.groups
    row = {}
    if settings.dynamic_sampling:
      row |= {
        "rollout/rounds": float(len(kept)),
        "rollout/mixed_fraction": passed / judged,
      }
    rest, batch = take_rows(batch, surplus), take_rows(batch, ~surplus)
    if settings.stop != "all":
      # Responses may be stale: what is over waits.
      state = state.replace(store=_joined(rest.rollout, state.store))
      row |= _partial_metrics(batch.rollout, state.store, weights.version)
    batch = Batch(responses=batch, version=weights.version, metrics=row)
    return Collected(batch, state, source_state, seen)

  def _streamed(
    self, arrived, state, source_state, weights, timer
  ) -> Collected:
    """Whole groups, each judged and handed over when it is complete."""
    state, source_state = self._begin(
      state, source_state, self._settings.groups, timer
    )
    judged: list[futures.Future[Judged]] = []
    # Judges while the engine writes on.
    with futures.ThreadPoolExecutor(1, "rewards") as thread:

      def hand_over(group: Rollout) -> None:
        judged.append(
          thread.submit(self._judge, group, state.conversations, timer)
        )
        arrived(judged[-1])

      with timer.phase("generate"):
        self.writer.write(
          state.store,
          weights,
          conversations=state.conversations,
          arrived=hand_over,
        )
    seen = [future.result() for future in judged]
    responses = join_rows([each.responses for each in seen])
    batch = Batch(responses=responses, version=weights.version, metrics={})
    return Collected(batch, state.replace(store=None), source_state, seen)

  def _windows(self, state, source_state, weights, timer) -> Collected:
    """T-PPO's successive batching: up to W more tokens of every response.

    Cut responses go on from where they stopped, under the new weights; as many
    others begin as have ended. A prompt of which only some responses found room
    gets the others next time.
    """
    settings = self._settings
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
    over, seen = ended(fresh), []
    parts = [unjudged(take_rows(fresh, ~over))]
    if over.any():
      over_rows = take_rows(fresh, over)
      seen = [self._judge(over_rows, state.conversations, timer)]
      parts.append(seen[0].responses)
    order = np.argsort(np.argsort(over, kind="stable"))  # As they were.
    batch = join_rows([take_rows(join_rows(parts), order)])
    goes_on = take_rows(rollout, rollout.status == Status.TRUNCATED)
    waiting = take_rows(state.store, np.s_[room:])
    state = state.replace(store=_joined(goes_on, waiting))
    batch = Batch(responses=batch, version=weights.version, metrics={})
    return Collected(batch, state, source_state, seen)

  def _begin(self, state, source_state, groups, timer):
    """Draws prompts, whose responses are in the store from then on."""
    with timer.phase("data"):
      prompts, source_state = self._source.draw(source_state, max(groups, 0))
    size = self._settings.group_size
    ids = state.samples + np.arange(len(prompts) * size).reshape(-1, size)
    store = _joined(state.store, self.writer.begin(prompts, ids))
    new = self.writer.conversations(prompts, ids)
    state = RolloutState(
      samples=state.samples + ids.size,
      store=store,
      # A table of its own, which is written to in place.
      conversations=state.conversations | new,
    )
    return state, source_state

  def _write_groups(self, state, missing, weights, timer) -> Rollout:
    """The store after its unfinished responses were written on."""
    settings, store = self._settings, state.store
    over = ended(store)
    ready = int(sampling.complete(over, store.group).sum())
    unfinished = take_rows(store, ~over)
    awaited = too_old(unfinished, weights.version, settings.patience)
    rule = STOPS[settings.stop].groups(missing - ready, awaited)
    with timer.phase("generate"):
      written = self.writer.write(
        unfinished, weights, rule=rule, conversations=state.conversations
      )
    # All of a response is trained on, whenever it was written.
    start = np.zeros_like(written.window_start)
    written = written.replace(window_start=start)
    return join_rows([take_rows(store, over), written])

  def _judge(
    self, rollout: Rollout, conversations: Conversations, timer: Any
  ) -> Judged:
    with timer.phase("reward"):
      prompts = self._prompts_of(rollout)
      return self.writer.judge(rollout, prompts, conversations)

  def _prompts_of(self, rollout: Rollout) -> Sequence[Prompt]:
    """The prompt of every row, read again: it may be of an earlier batch."""
    rows = list(zip(rollout.example_id.tolist(), rollout.group_id.tolist()))
    prompts = {row: self._source.prompt(*row) for row in set(rows)}
    return [prompts[row] for row in rows]


def mixed(responses: Responses) -> np.ndarray:
  """bool [B], rows whose group has right and wrong responses.

  Verdicts count, not shaped rewards: a group that differs only in length
  teaches nothing about the task. A response that could not be judged is neither
  right nor wrong.
  """
  group, correct = responses.rollout.group, responses.correct
  judged = responses.judged
  right = np.bincount(group, correct & judged)
  wrong = np.bincount(group, ~correct & judged)
  return ((right > 0) & (wrong > 0))[group]


def too_old(rollout: Rollout, version: int, max_staleness: int) -> np.ndarray:
  """Rows of groups whose first token is so many updates old, int [n]."""
  age = version - rollout.version[:, 0]
  old = (rollout.lengths > 0) & (age >= max_staleness)
  return np.flatnonzero(np.isin(rollout.group_id, rollout.group_id[old]))


def run_key(seed: int, stream: int) -> jax.Array:
  """Key of an independent stream of randomness under the run's seed."""
  return jax.random.fold_in(jax.random.key(seed), stream)


def _joined(*parts: Rollout | None) -> Rollout | None:
  """All rows below each other, None if there are none."""
  present = [part for part in parts if part is not None and len(part.lengths)]
  return join_rows(present) if present else None


def sample_ids(rollout: Rollout | None) -> np.ndarray:
  """Sample ids of the rows, int [B]; none without a rollout."""
  return np.zeros(0, int) if rollout is None else rollout.sample_id


def _count_groups(rollout: Rollout | None) -> int:
  return 0 if rollout is None else len(np.unique(rollout.group_id))


def _partial_metrics(
  trained: Rollout, store: Rollout | None, version: int
) -> dict[str, float]:
  """What partial rollouts leave unfinished, and what they train late."""
  begun = 0 if store is None else int((store.lengths > 0).sum())
  late = (trained.version < version)[trained.mask]
  return {
    "rollout/partial": float(begun),
    "rollout/off_policy_fraction": float(late.mean()),
  }


def _too_few(settings, rounds, judged, passed) -> TrainingStopped:
  return TrainingStopped(
    f"{rounds} rounds judged {judged} groups, but only {passed} of the"
    f" {settings.groups} wanted have right and wrong responses: the data are"
    " too easy or too hard; change them, raise schedule.over_provision or"
    " schedule.max_rounds, or set schedule.dynamic_sampling=False"
  )
