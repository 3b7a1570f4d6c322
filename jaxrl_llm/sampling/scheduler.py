"""The scheduler: assigns slots and KV cache pages to requests.

A step allocates the pages that running responses may need, inserts waiting
responses into free slots, runs one decode call and stores its tokens. If pages
run out, the youngest response is preempted: it waits again, and all of its
tokens are prefilled later.

Pages of a paused response stay cached until they are needed, in case it
continues under the same weights.
"""

import collections
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.sampling import buckets, rules, stops
from jaxrl_llm.sampling import requests as requests_lib
from jaxrl_llm.sampling.paged_cache import PagedCache
from jaxrl_llm.sampling.requests import Request, Rows
from jaxrl_llm.sampling.rules import Decision, SchedulerView, SchedulingRule
from jaxrl_llm.sampling.settings import EngineConfig
from jaxrl_llm.sampling.speculation import AdaptiveSpeculation
from jaxrl_llm.sampling.stats import DecodeCall, EngineStats
from jaxrl_llm.types import Origin, Rollout, Status, join_rows

_TRACED = 1 << 16  # Maximum number of decode calls in `Scheduler.trace`.

TurnHook = Callable[[Sequence[Request]], bool]  # See `Scheduler.run`.


class Scheduler:
  """Runs requests through the slots in order of arrival."""

  # (rollout, **options) -> a request for each row, enqueued; of a subclass.
  add: Callable[..., list[Request]]

  def __init__(
    self,
    config: EngineConfig,
    cache: PagedCache,
    *,
    speculation: AdaptiveSpeculation,
    detokenize: Callable[[Sequence[int]], str] | None,
    clock: Callable[[], float] = time.perf_counter,
  ):
    """Makes a scheduler without requests.

    Args:
      config: sizes.
      cache: the KV cache with its programs.
      speculation: chooses the number of draft tokens of a step.
      detokenize: tokens to text, for stop strings.
      clock: returns seconds; only differences matter.
    """
    self.config, self._cache = config, cache
    self._speculation, self._detokenize = speculation, detokenize
    self._clock = clock
    self.stats = EngineStats()  # Counts all steps.
    self.last_stats = EngineStats()  # Counts the newest `run`.
    # The newest calls of the newest `run`, or of all steps without one.
    self.trace = collections.deque[DecodeCall](maxlen=_TRACED)
    self.reset()

  def reset(self) -> None:
    """Drops requests, weights and KV cache."""
    self._requests: dict[Request, None] = {}  # Oldest first.
    self._slots: list[Request | None] = [None] * self.config.slots
    self._cache.reset()
    self._version, self._batch_size = 0, self.config.slots

  def requests(self) -> list[Request]:
    """Returns the requests that wait or are in slots, oldest first."""
    return list(self._requests)

  def set_params(self, params: Any, version: int) -> None:
    """Sets new weights, also for running responses.

    Their KV is rebuilt, so that new tokens are on-policy given the old ones.

    Args:
      params: parameters of the programs; the same object keeps the KV cache.
      version: version of the policy, recorded with every new token.
    """
    self._version = version
    if params is self._cache.params:
      return
    for request in self._running():
      self._leave(request, keep=False)
    self._cache.set_params(params)

  def enqueue(self, requests: Iterable[Request]) -> None:
    """Appends requests to the queue for slots."""
    self._requests |= dict.fromkeys(requests)

  def answer(
    self, request: Request, tokens: Sequence[int], origin: Origin
  ) -> None:
    """Continues an ended or paused response after tokens of other origin.

    If its KV is still cached, only these tokens are prefilled. A response
    without window budget waits for the next call.

    Raises:
      ValueError: The response is running, or the tokens do not fit.
    """
    if request in self._requests:
      raise ValueError(
        "only a response that has ended or paused can be extended"
      )
    requests_lib.extend(request, tokens, origin, version=self._version)
    if request.length < request.pause_at:
      self.enqueue([request])

  def generate_window(
    self,
    params: Any,
    requests: Rollout,
    *,
    version: int,
    rule: SchedulingRule = rules.continuous_batching,
    turns: TurnHook | None = None,
    **options: Any,
  ) -> Rollout:
    """Continues responses, by at most `window` tokens if it is among `options`.

    New tokens are on-policy given the old ones. With unchanged weights, a
    response that was cut and continued equals the uncut one.

    Args:
      params: as in `set_params`; responses are continued under these weights.
      requests: rows of `new_requests`, or rows cut by an earlier call.
      version: as in `set_params`.
      rule: as in `run`.
      turns: as in `run`.
      **options: keywords of `add`.

    Returns:
      The rows, in order. `window_start` is the length before the call, earlier
      tokens are unchanged, and the status of a row that can be continued is
      TRUNCATED. Rows of equal `group_id` have equal `group`.

    Raises:
      ValueError: A row or setting is out of range.

    Reference:
      Fan et al. 2025, Truncated PPO, arXiv 2506.15050 (windowed rollouts).
    """
    rollout = join_rows([requests])
    rollout.window_start[:] = rollout.lengths
    self.set_params(params, version)
    added = self.add(rollout, extendable=turns is not None, **options)
    self.run(added, rule, turns)
    return rollout

  def abort(self, requests: Iterable[Request]) -> None:
    """Removes requests; their rows stay as they are and may be added again.

    Ignores requests that are not in the scheduler.
    """
    for request in requests:
      if request in self._requests:
        del self._requests[request]
        paused = request.row.status[0] == Status.TRUNCATED
        self._leave(request, keep=paused or request.params.extendable)

  def run(
    self,
    requests: Iterable[Request],
    rule: SchedulingRule,
    turns: TurnHook | None = None,
  ) -> None:
    """Steps until requests have ended or paused, or the rule halts.

    Args:
      requests: waiting requests; unfinished ones are cut at the end.
      rule: decides on insertion and on the end of the call.
      turns: called after every step with the requests that left; it may extend
        them then or later, and returns whether it did or will.
    """
    requests = list(requests)
    before = self.stats
    self.trace = collections.deque(maxlen=_TRACED)
    try:
      while True:
        decision = self._decide(rule, requests)
        stopped = self._stop([requests[row] for row in decision.stop])
        if decision.halt:
          break
        calls = self.stats.decode_calls
        left = self.step(decision.insert)
        talks = turns is not None and turns(left)
        # Dropped responses have freed slots: apply the rule again.
        if self.stats.decode_calls == calls and not (talks or stopped):
          break
      while turns is not None and turns(()):
        pass  # Cut requests keep the observations that they received.
    except BaseException:
      self.reset()  # A failed program may have consumed the donated cache.
      raise
    self.abort(requests)
    self.last_stats = self.stats - before

  def _stop(self, requests: Iterable[Request]) -> bool:
    """Drops waiting and running requests; returns whether there were any."""
    here = [request for request in requests if request in self._requests]
    for request in here:
      request.row.status[0] = int(Status.STOPPED)
    self.abort(here)
    return bool(here)

  def step(self, insert: int | None = None) -> list[Request]:
    """Inserts waiting requests and decodes once.

    Requests that are decoded together have the same `SamplingParams`: others
    wait until these have left.

    Args:
      insert: maximum number of requests to insert; `rules.refill` by default.

    Returns:
      Requests that have ended or paused; they have left the scheduler.
    """
    start, before = self._clock(), self._cache.stats
    self._reserve()
    slots, waiting = self._slots, self._waiting()
    if insert is None:
      insert = rules.refill(len(slots), slots.count(None), len(waiting))
    self._insert(waiting[:insert])
    prefilled = self._cache.stats - before
    left = self._decode(start, prefilled) if self._running() else []
    wall_s = self._clock() - start
    self.stats += prefilled + EngineStats(wall_s=wall_s, host_s=wall_s)
    return left

  def _decide(self, rule: SchedulingRule, requests: list[Request]) -> Decision:
    """Applies the rule to the requests and returns its decision."""
    here = np.asarray([request in self._requests for request in requests])
    active = np.asarray([request.slot is not None for request in requests])
    column = lambda name: np.asarray([r.row[name][0] for r in requests])
    status, lengths = column("status"), column("lengths")
    return rule(
      SchedulerView(
        slots=len(self._slots),
        waiting=here & ~active,
        active=active,
        awaiting_environment=np.asarray(
          [request.awaiting_environment for request in requests]
        ),
        ended=status != Status.TRUNCATED,
        lengths=lengths,
        groups=column("group"),
      )
    )

  def _running(self) -> list[Request]:
    """Returns the requests in slots, oldest first."""
    return [r for r in self._requests if r.slot is not None]

  def _waiting(self) -> list[Request]:
    """Returns the requests that may be inserted, oldest first."""
    waiting = [r for r in self._requests if r.slot is None]
    first = next(iter(self._running() or waiting), None)
    return [r for r in waiting if r.params is first.params]

  def _blocks(self, length: int) -> int:
    """Returns how many pages a response of a length needs for a decode call."""
    ahead = self.config.page_size + self.config.num_draft_tokens
    return self.config.pages_of(min(length + ahead, self.config.max_length))

  def _reserve(self) -> None:
    """Allocates pages to running requests; preempts the youngest if needed."""
    for request in self._running():
      while request.slot is not None:
        missing = self._blocks(request.context_length) - len(request.pages)
        pages = self._cache.allocator.allocate(request.shard, max(missing, 0))
        if pages is not None:
          request.pages += pages
          break
        beside = [r for r in self._running() if r.shard == request.shard]
        self._preempt(beside[-1])

  def _preempt(self, request: Request) -> None:
    """Takes a request out of its slot; it waits again, in order of age."""
    self._leave(request, keep=False)
    self.stats += EngineStats(preemptions=1)

  def _leave(self, request: Request, *, keep: bool) -> None:
    """Takes a request out of its slot; `keep` caches its context."""
    if request.slot is None:
      return
    self._slots[request.slot], request.slot = None, None
    pages, request.pages = request.pages, []
    # A stop string may have removed tokens, or an exact request may not have
    # read all of them.
    request.cached = min(request.position + 1, request.context_length)
    held = self.config.pages_of(request.cached) if keep else 0
    self._cache.allocator.free(request.shard, pages[held:])
    if keep:
      context = request.context()[: request.cached].tobytes()
      self._cache.allocator.keep(context, request.shard, pages[:held])

  def _insert(self, requests: Sequence[Request]) -> None:
    """Inserts requests into slots, for as long as there are pages."""
    share = len(self._slots) // self._cache.shards
    allocator = self._cache.allocator
    free = [i for i, request in enumerate(self._slots) if request is None]
    free.sort(key=lambda slot: slot % share)  # Alternate between the shards.
    new: dict[tuple, dict[int, Request]] = {}  # By prefix and shard.
    copies, extensions = [], []
    queue, full = collections.deque(requests), set[int]()  # Shards.
    while queue and (left := [s for s in free if s // share not in full]):
      request = queue[0]
      context = request.context()
      key = context[: request.cached or len(context)].tobytes()
      home = allocator.shard_of(key)
      slot = next((s for s in left if s // share == home), left[0])
      shard, prefix = slot // share, request.prefix
      kept = allocator.take(key) if shard == home else None
      exact = self.config.exact
      first = None if kept or exact else new.get(prefix, {}).get(shard)
      # The page of the last token is never shared, because it is written to.
      shared = (len(context) - 1) // self.config.page_size
      shared *= self._cache.shares_pages
      pages = kept or (first.pages[:shared] if first else [])
      own = allocator.allocate(shard, self._blocks(len(context)) - len(pages))
      if own is None:
        if kept:
          allocator.keep(key, shard, kept)
        full.add(shard)  # Another one may have pages.
        continue
      queue.popleft()
      full.clear()
      request.position = len(context) - 1
      if exact:  # Contexts are read by decoding, unless they are cached.
        cached = request.cached or len(context)
        request.position = cached - 1 if kept else 0
      elif first:
        allocator.share(shard, pages)
        held = self.config.pages_of(len(context))
        others = zip(first.pages[shared:held], own)
        copies += [(shard, *pair) for pair in others]
      elif not kept:
        new.setdefault(prefix, {})[shard] = request
      elif 0 < request.cached < len(context):
        extensions.append(request)
      request.pages, request.shard, request.slot = pages + own, shard, slot
      self._slots[slot] = request
      free.remove(slot)
      self._batch_size = self.config.slots
    contexts = [list(same.values()) for same in new.values()]
    self._cache.insert(contexts, copies, extensions)

  def _batch(self) -> tuple[Rows, int]:
    """Returns the rows of a decode call, and its `min_active`.

    If no request waits for a slot, the call has the smallest batch that holds
    the responses, and returns when the rest fit into a smaller one. Otherwise
    it returns when enough slots are free for a refill.
    """
    inserted = [r for r in self._slots if r is not None]
    active, slots, shards = len(inserted), self.config.slots, self._cache.shards
    if self._waiting():
      return list(self._slots), max(active - rules.min_free(slots), 0) + 1
    sizes = [slots]
    if not self.config.exact:
      sizes = buckets.slot_buckets(slots, shards)
    fullest = np.bincount([r.shard for r in inserted]).max() * shards
    size = buckets.round_up(fullest, sizes)
    if size < self._batch_size:  # Requests in slots move to the front.
      self._slots = self._cache.rows(inserted, slots)
      for request in inserted:
        request.slot = self._slots.index(request)
    self._batch_size = size
    smaller = max((n for n in sizes if n < size), default=0)
    rows = np.arange(slots).reshape(shards, -1)[:, : size // shards].flat
    min_active = smaller + 1 if active > smaller else 1
    return [self._slots[row] for row in rows], min_active

  def _decode(self, begun: float, prefilled: EngineStats) -> list[Request]:
    """Runs one decode call and returns the requests that left.

    Args:
      begun: time at which the step began.
      prefilled: counters of the step's prefills.
    """
    rows, min_active = self._batch()
    running = self._running()
    num_draft_tokens = self._speculation.choose(len(running))
    start = self._clock()
    output = self._cache.decode(
      rows, running[0].params.metadata, min_active, num_draft_tokens
    )
    seconds = self._clock() - start
    tokens, steps = int(output.count.sum()), int(output.steps.max())
    written = 0
    self._speculation.observe(len(running), num_draft_tokens, tokens, seconds)
    capacity = self.config.page_size * sum(len(r.pages) for r in running)
    left = []
    for row, request in enumerate(rows):
      if request is None:
        continue
      before = request.length
      written += request.append(output, row, version=self._version)
      if self._stopped(request, before) or not output.active[row]:
        self.abort([request])
        left.append(request)
    self.stats += EngineStats(
      decode_calls=1,
      decode_steps=steps,
      slot_steps=steps * len(rows),
      tokens=written,
      host_s=-seconds,
    )
    self.trace.append(
      DecodeCall(
        len(rows),
        steps,
        capacity,
        prefilled.prefill_calls,
        prefilled.prefill_tokens,
        self._clock() - begun,
      )
    )
    return left

  def _stopped(self, request: Request, before: int) -> bool:
    """Ends a response at the token that completes a stop string."""
    strings = request.params.settings.stop_strings
    if not strings:
      return False
    start = request.turn_start
    length = stops.first_stop(
      request.row.tokens[0, start : request.length].tolist(),
      strings,
      self._detokenize,
      before=before - start,
    )
    if length:
      requests_lib.cut(request.row, 0, start + length, status=Status.FINISHED)
    return bool(length)
