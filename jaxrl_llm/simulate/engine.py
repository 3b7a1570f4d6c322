"""The engine's scheduler with programs that charge a clock.

Queue, slots, pages and rules are those of `jaxrl_llm.sampling`; no token is
computed, and time is added up instead of spent.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import chex
import numpy as np

from jaxrl_llm.sampling import rules
from jaxrl_llm.sampling.paged_cache import PagedCache, Programs
from jaxrl_llm.sampling.requests import Request, Rows, SamplingParams
from jaxrl_llm.sampling.scheduler import Scheduler
from jaxrl_llm.sampling.settings import EngineConfig, SamplingSettings
from jaxrl_llm.sampling.slots import DecodeOutput
from jaxrl_llm.sampling.speculation import AdaptiveSpeculation
from jaxrl_llm.simulate.cost import CostModel
from jaxrl_llm.types import Rollout, Status

_NEVER = -1


@dataclasses.dataclass
class SimulatedStats:
  """What sampling has cost so far."""

  generate_s: float = 0.0
  prefill_s: float = 0.0
  idle_s: float = 0.0  # The host between decode calls.
  decode_calls: int = 0
  decode_steps: int = 0
  tokens: int = 0  # Written.
  prefill_calls: int = 0
  prefill_tokens: int = 0  # Of contexts.
  peak_kv_capacity: int = 0  # Most tokens that pages in use had room for.

  @property
  def seconds(self) -> float:
    return self.generate_s + self.prefill_s + self.idle_s


@dataclasses.dataclass(eq=False)
class Simulated(Request):
  """A response of which nothing but its length is known."""

  stats: SimulatedStats = None  # The clock.
  group: int = 0  # Number of the prompt.
  number: int = 0  # Of the response.
  fresh: int = 0  # Tokens by the weights of now.
  begun: int = _NEVER  # Version that wrote the first token.
  ended_s: float = 0.0  # When it ended.

  @property
  def last_token(self) -> int:
    return 1

  @property
  def ended(self) -> bool:
    return self.length >= self.max_tokens

  def context(self) -> np.ndarray:
    """Tokens that are the same where contexts are, and never 0."""
    tokens = np.ones(self.context_length, np.int32)
    tokens[0] = -1 - self.number if self.length else 1 + self.group
    return tokens

  def append(self, output: DecodeOutput, slot: int, *, version: int) -> None:
    """Counts what a slot wrote."""
    self.begun = version if self.begun == _NEVER else self.begun
    self.fresh += int(output.count[slot])
    self.row.lengths[0] += output.count[slot]
    self.row.status[0] = output.status[slot]
    self.ended_s = self.stats.seconds


class Work:
  """Responses in the order in which they get slots; columns are arrays [B]."""

  def __init__(self, requests: Iterable[Simulated] = ()):
    self.requests = list(requests)

  def __len__(self) -> int:
    return len(self.requests)

  def __getitem__(self, chosen: np.ndarray) -> "Work":
    return Work(r for r, here in zip(self.requests, chosen) if here)

  def __add__(self, other: "Work") -> "Work":
    return Work(self.requests + other.requests)

  def __getattr__(self, name: str) -> np.ndarray:
    """A column of what each response has by this name."""
    if name.startswith("__"):
      raise AttributeError(name)
    return np.asarray([getattr(request, name) for request in self.requests])


class SimulatedSlots(Scheduler):
  """The scheduler of an engine that takes the time it is told to."""

  def __init__(
    self,
    cost: CostModel,
    *,
    slots: int,
    max_length: int,
    group_size: int,
    page_size: int | None = None,
  ):
    """Makes free slots.

    Args:
      cost: prices.
      slots: S.
      max_length: most tokens of a slot, prompt and response.
      group_size: most responses of a prompt.
      page_size: tokens per page, and most decode steps of a call; None chooses
        as the engine does.
    """
    if min(slots, max_length, group_size) < 1:
      raise ValueError(
        "slots, max_length and group_size must be >= 1, got"
        f" {slots}, {max_length}, {group_size}"
      )
    self.clock = SimulatedStats()
    self._cost = cost
    self._params = SamplingParams(SamplingSettings(), None, group_size)
    config = EngineConfig(
      slots, max(max_length - 1, 1), 1, stop_tokens=(), page_size=page_size
    )
    programs = Programs(
      init_kv_cache=tuple,
      prefill=self._charge_prefill,
      insert=lambda *_: (),
      copy_pages=lambda *_: (),
      extend=lambda *_: (),
      decode=self._charge_decode,
    )
    super().__init__(
      config,
      lambda: _Cache(
        programs, config, shards=1, sharding=None, shares_pages=False
      ),
      speculation=AdaptiveSpeculation(0),
      detokenize=None,
    )

  def make_work(
    self,
    numbers: np.ndarray,
    group: np.ndarray,
    prompt: np.ndarray,
    total: np.ndarray,
  ) -> Work:
    """Responses without a token yet, int [B] each."""
    columns = np.stack([numbers, group, prompt, total], axis=1).tolist()
    return Work(
      Simulated(
        row=_row(group, prompt),
        params=self._params,
        max_tokens=total,
        pause_at=total,
        stats=self.clock,
        group=group,
        number=number,
      )
      for number, group, prompt, total in columns
    )

  def write(self, work: Work, rule: rules.SchedulingRule, version: int) -> None:
    """Writes until the rule halts or each response has paused."""
    self.set_params(object(), version)
    for request in work.requests:
      request.fresh = 0
    self.enqueue(r for r in work.requests if not r.ended)
    self.run(work.requests, rule)

  def _charge_prefill(self, params: Any, tokens: np.ndarray) -> tuple:
    contexts = np.count_nonzero(tokens, axis=1)
    contexts = contexts[contexts > 0]
    self.clock.prefill_s += self._cost.prefill_s(contexts, 1)
    self.clock.prefill_calls += 1
    self.clock.prefill_tokens += int(contexts.sum())
    return ()

  def _charge_decode(
    self, params, kv_cache, rows, metadata, min_active, *, num_draft_tokens
  ) -> tuple[tuple, DecodeOutput]:
    """A page at most, less if slots get free for others."""
    column = lambda of: np.asarray([0 if r is None else of(r) for r in rows])
    left = column(lambda r: r.pause_at - r.length)
    limit = column(lambda r: r.max_tokens - r.length)
    capacity = self.config.page_size * int(column(lambda r: len(r.pages)).sum())
    present = np.flatnonzero(left)
    order = present[np.argsort(left[present], kind="stable")]
    most = left[order[len(order) - min_active]]
    steps, clock = int(min(self.config.page_size, most)), self.clock
    context = column(lambda r: r.context_length)[order]
    clock.generate_s += self._decode_s(
      context, left[order], steps, len(rows), capacity
    )
    count = np.minimum(left, steps)
    clock.idle_s += self._cost.scheduler_step_s
    clock.decode_calls += 1
    clock.decode_steps += steps
    clock.tokens += int(count.sum())
    clock.peak_kv_capacity = max(clock.peak_kv_capacity, capacity)
    status = np.where(count < limit, Status.TRUNCATED, Status.OVERLONG)
    steps = np.full(len(rows), steps)
    return (), DecodeOutput(None, None, count, steps, left > steps, status)

  def _decode_s(self, context, left, steps, batch_size, capacity) -> float:
    """Seconds of steps with responses that have `left` to write, ascending."""
    if self._cost.padded:
      return steps * float(self._cost.decode_s(batch_size, capacity))
    step = np.arange(steps)
    gone = np.searchsorted(left, step, side="right")
    slots = len(left) - gone
    rest = np.append(np.cumsum(context[::-1])[::-1], 0)
    return float(self._cost.decode_s(slots, rest[gone] + slots * step).sum())


class _Cache(PagedCache):
  """Gives its programs the rows themselves, and leaves arrays on the host."""

  def decode_arguments(self, rows: Rows) -> tuple:
    return (rows,)

  def _put(self, arguments: tuple) -> tuple:
    return arguments


def _row(group: int, prompt: int) -> Rollout:
  """A row of a rollout, without any tokens."""
  fields = dataclasses.fields(Rollout)
  row = Rollout(**{field.name: np.zeros(1, np.int32) for field in fields})
  row.prompt_lengths[0], row.group[0], row.group_id[0] = prompt, group, group
  row.status[0] = int(Status.TRUNCATED)
  return row


def predict(
  lengths: chex.Array,
  cost: CostModel,
  *,
  prompt_lengths: chex.Array,
  slots: int,
  max_prompt_length: int | None = None,
  max_response_length: int | None = None,
  page_size: int | None = None,
  rule: rules.SchedulingRule = rules.continuous_batching,
) -> SimulatedStats:
  """What one call of `Engine.generate` costs when responses turn out so long.

  Decode calls, decode steps and tokens are those of its `EngineStats`;
  `seconds` is to be held against its `wall_s`. Stop strings, speculation and
  several shards are not simulated.

  Args:
    lengths: int [N, G], tokens of the responses.
    cost: prices, see `fit`.
    prompt_lengths: int [N].
    slots: S of the engine.
    max_prompt_length: of the engine; the longest prompt by default.
    max_response_length: of the engine; the longest response by default.
    page_size: of the engine.
    rule: of the call.
  """
  lengths, prompt_lengths = np.asarray(lengths), np.asarray(prompt_lengths)
  check_requests(prompt_lengths, lengths)
  max_length = (max_prompt_length or int(prompt_lengths.max())) + (
    max_response_length or int(lengths.max())
  )
  groups, group_size = lengths.shape
  simulated = SimulatedSlots(
    cost,
    slots=slots,
    max_length=max_length,
    group_size=group_size,
    page_size=page_size,
  )
  work = simulated.make_work(
    np.arange(lengths.size),
    np.repeat(np.arange(groups), group_size),
    np.repeat(prompt_lengths, group_size),
    lengths.reshape(-1),
  )
  simulated.write(work, rule, version=0)
  return simulated.clock


def check_requests(prompt_lengths: np.ndarray, lengths: np.ndarray) -> None:
  """Refuses lengths that are not [N], [N, G] and at least 1."""
  if lengths.ndim != 2 or prompt_lengths.shape != lengths.shape[:1]:
    raise ValueError(
      "lengths must be [N, G] and prompt_lengths [N], got shapes"
      f" {lengths.shape} and {prompt_lengths.shape}"
    )
  if not lengths.size or min(lengths.min(), prompt_lengths.min()) < 1:
    raise ValueError("there must be lengths, all of them at least 1")
