"""The engine's slots with a clock instead of a device.

The same rules decide over the same views at the same scheduler steps as in
`jaxrl_llm.sampling.Engine`, so decode calls, decode steps and the size of the
KV cache are those of the engine. Only time is computed instead of spent.
"""

import dataclasses

import chex
import numpy as np

from jaxrl_llm.sampling import buckets, rules
from jaxrl_llm.sampling.allocator import default_page_size
from jaxrl_llm.simulate.cost import CostModel

_NEVER = -1


@dataclasses.dataclass
class Work:
  """Responses, B of them in the order in which they get slots."""

  group: np.ndarray  # int [B], number of the prompt, ascending.
  prompt: np.ndarray  # int [B], tokens of the prompt.
  total: np.ndarray  # int [B], tokens that the response will have.
  pause_at: np.ndarray  # int [B], those at which writing pauses.
  written: np.ndarray  # int [B], tokens so far.
  fresh: np.ndarray  # int [B], of them, those of the weights of now.
  begun: np.ndarray  # int [B], version that wrote the first token, or -1.
  waiting: np.ndarray  # bool [B], will get a slot.
  active: np.ndarray  # bool [B], has one.
  ended_s: np.ndarray  # float [B], when it ended.

  def __len__(self) -> int:
    return len(self.group)

  def __getitem__(self, chosen: np.ndarray) -> "Work":
    return Work(*(column[chosen] for column in vars(self).values()))

  @property
  def ended(self) -> np.ndarray:
    return self.written >= self.total

  @property
  def context(self) -> np.ndarray:
    return self.prompt + self.written


def new_work(group: np.ndarray, prompt: np.ndarray, total: np.ndarray) -> Work:
  """Responses without a token yet."""
  nothing, no = np.zeros_like(total), np.zeros(total.shape, bool)
  return Work(
    group=group,
    prompt=prompt,
    total=total,
    pause_at=total.copy(),
    written=nothing,
    fresh=nothing.copy(),
    begun=np.full_like(total, _NEVER),
    waiting=~no,
    active=no,
    ended_s=np.zeros(total.shape),
  )


def join(first: Work, second: Work) -> Work:
  """The responses of both, in order."""
  both = zip(vars(first).values(), vars(second).values())
  return Work(*map(np.concatenate, both))


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
  peak_kv_capacity: int = 0  # Most tokens that the KV cache had room for.

  @property
  def seconds(self) -> float:
    return self.generate_s + self.prefill_s + self.idle_s


class SimulatedSlots:
  """Slots that responses go through."""

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
    self.stats = SimulatedStats()
    self._cost = cost
    self._slots = slots
    self._max_length = max_length
    self._page_size = page_size or default_page_size(max_length)
    self._refill = max(1, slots // rules.REFILL_SHARE)
    self._slot_buckets = buckets.slot_buckets(slots, 1)
    self._pages = 0  # In use.
    few = -(-(self._refill - 1) // group_size) + 1
    self._prefill_sizes = few, max(few, slots // group_size)

  def write(self, work: Work, rule: rules.SchedulingRule, version: int) -> None:
    """Writes until the rule halts or each response has paused."""
    while self.step(work, rule, version=version):
      pass
    work.active[:] = work.waiting[:] = False

  def step(self, work: Work, rule: rules.SchedulingRule, version: int) -> bool:
    """A scheduler step and its decode call; False if nothing is left.

    Raises:
      ValueError: the rule gives up or branches responses.
    """
    group = work.group - work.group[0] if len(work) else work.group
    decision = rule(
      rules.SchedulerView(
        slots=self._slots,
        waiting=work.waiting,
        active=work.active,
        ended=work.ended,
        lengths=work.written,
        groups=group,
      )
    )
    if len(decision.stop) or len(decision.fork):
      raise ValueError(
        "the simulator knows insert and halt, got a decision to stop or fork"
      )
    free = self._slots - int(work.active.sum())
    numbers = np.flatnonzero(work.waiting)[: min(decision.insert, free)]
    if len(numbers):
      self.prefill(work, numbers)
      work.waiting[numbers] = False
      work.active[numbers] = True
    if decision.halt or not work.active.any():
      return False
    self._decode(work, version)
    return True

  def prefill(self, work: Work, numbers: np.ndarray) -> None:
    """Pays for contexts; new responses of a prompt share theirs."""
    begun = work.written[numbers] > 0
    new, cut = numbers[~begun], numbers[begun]
    _, first = np.unique(work.group[new], return_index=True)
    few, many = self._prefill_sizes
    calls = -(-len(first) // (few if len(first) <= few else many))
    calls += -(-len(cut) // self._refill)
    contexts = np.concatenate([work.prompt[new[first]], work.context[cut]])
    self.stats.prefill_s += self._cost.prefill_s(contexts, calls)
    self.stats.prefill_calls += calls
    self.stats.prefill_tokens += int(contexts.sum())

  def _decode(self, work: Work, version: int) -> None:
    """One decode call: a page at most, less if slots get free for others."""
    active = np.flatnonzero(work.active)
    left = work.pause_at[active] - work.written[active]
    active = active[np.argsort(left, kind="stable")]
    left = np.sort(left)
    slots, min_active = self._slots, max(len(active) - self._refill, 0) + 1
    if not work.waiting.any():
      slots = buckets.round_up(len(active), self._slot_buckets)
      smaller = max((n for n in self._slot_buckets if n < slots), default=0)
      min_active = smaller + 1 if len(active) > smaller else 1
    steps = int(min(self._page_size, left[len(left) - min_active]))
    context = work.context[active]
    self._reserve(work, active)
    count = np.minimum(left, steps)
    stats = self.stats
    stats.generate_s += self._decode_s(context, left, steps, slots)
    stats.idle_s += self._cost.scheduler_step_s
    stats.decode_calls += 1
    stats.decode_steps += steps
    stats.tokens += int(count.sum())
    capacity = self._pages * self._page_size
    stats.peak_kv_capacity = max(stats.peak_kv_capacity, capacity)
    work.written[active] += count
    work.fresh[active] += count
    work.begun[active[work.begun[active] == _NEVER]] = version
    gone = active[left <= steps]
    work.active[gone] = False
    work.ended_s[gone] = stats.seconds

  def _decode_s(self, context, left, steps, batch_size) -> float:
    """Seconds of steps with responses that have `left` to write, ascending."""
    if self._cost.padded:
      capacity = self._pages * self._page_size
      return steps * float(self._cost.decode_s(batch_size, capacity))
    step = np.arange(steps)
    gone = np.searchsorted(left, step, side="right")
    slots = len(left) - gone
    rest = np.append(np.cumsum(context[::-1])[::-1], 0)
    return float(self._cost.decode_s(slots, rest[gone] + slots * step).sum())

  def _reserve(self, work: Work, active: np.ndarray) -> None:
    """Pages for the next decode call."""
    ahead = work.context[active] + self._page_size
    pages = -(-np.minimum(ahead, self._max_length) // self._page_size)
    self._pages = int(pages.sum())


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
  group_size = lengths.shape[1]
  simulated = SimulatedSlots(
    cost,
    slots=slots,
    max_length=max_length,
    group_size=group_size,
    page_size=page_size,
  )
  repeat = lambda x: np.repeat(x, group_size).astype(np.int64)
  work = new_work(
    repeat(np.arange(len(lengths))),
    repeat(prompt_lengths),
    lengths.reshape(-1).astype(np.int64),
  )
  simulated.write(work, rule, version=0)
  return simulated.stats


def check_requests(prompt_lengths: np.ndarray, lengths: np.ndarray) -> None:
  """Refuses lengths that are not [N], [N, G] and at least 1."""
  if lengths.ndim != 2 or prompt_lengths.shape != lengths.shape[:1]:
    raise ValueError(
      "lengths must be [N, G] and prompt_lengths [N], got shapes"
      f" {lengths.shape} and {prompt_lengths.shape}"
    )
  if not lengths.size or min(lengths.min(), prompt_lengths.min()) < 1:
    raise ValueError("there must be lengths, all of them at least 1")
