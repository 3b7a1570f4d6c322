"""Runs of training under a schedule of rollouts, simulated step by step.

Every function takes the same requests, prices and setting, and returns a
`Trace`. All but `asynchronous` take turns: sample, train, sync. Prompts are
taken in order, and from the start again when all have been used.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from jaxrl_llm.sampling import rules
from jaxrl_llm.simulate import slots as slots_lib
from jaxrl_llm.simulate.cost import CostModel
from jaxrl_llm.simulate.lengths import Requests
from jaxrl_llm.simulate.slots import Work


class Setting(NamedTuple):
  """What all schedules of a comparison have in common."""

  slots: int  # S.
  groups: int  # N, prompts that a training step is made of.
  steps: int  # K, of training.
  page_size: int | None = None  # As in the engine.


@dataclasses.dataclass(frozen=True)
class Trace:
  """K training steps, simulated; arrays [K] where nothing else is said.

  A step takes generate + prefill + sync + idle + train seconds; in an
  asynchronous run training lies beside the others and is not added.
  """

  slots: int  # A number.
  parked: int  # A number: tokens written, neither trained nor thrown away.
  wall_s: np.ndarray
  generate_s: np.ndarray
  prefill_s: np.ndarray
  train_s: np.ndarray
  sync_s: np.ndarray
  idle_s: np.ndarray  # Of the sampler, for the host or for the trainer.
  generated: np.ndarray  # Tokens.
  trained: np.ndarray  # Tokens with a policy loss.
  thrown_away: np.ndarray  # Tokens.
  off_policy: np.ndarray  # Trained tokens of older weights than those trained.
  max_staleness: np.ndarray  # Steps between the oldest and now.
  responses: np.ndarray  # Whole responses that were trained on.
  response_tokens: np.ndarray  # Their tokens.
  decode_steps: np.ndarray
  peak_kv_capacity: np.ndarray

  def after(self, steps: int) -> "Trace":
    """The run without its first steps, while the slots fill."""
    fields = vars(self).items()
    cut = {k: v[steps:] for k, v in fields if isinstance(v, np.ndarray)}
    return dataclasses.replace(self, **cut)

  @property
  def responses_per_s(self) -> float:
    return self.responses.sum() / self.wall_s.sum()

  @property
  def tokens_per_s(self) -> float:
    """Trained ones."""
    return self.trained.sum() / self.wall_s.sum()

  @property
  def utilisation(self) -> float:
    """Share of the slots that write, over decoding steps."""
    return self.generated.sum() / (self.slots * self.decode_steps.sum())

  @property
  def off_policy_share(self) -> float:
    return self.off_policy.sum() / max(self.trained.sum(), 1)

  @property
  def mean_length(self) -> float:
    """Of the whole responses that were trained on."""
    return self.response_tokens.sum() / max(self.responses.sum(), 1)


def static(requests: Requests, cost: CostModel, setting: Setting) -> Trace:
  """Static batches: a wave of S responses waits for its longest."""
  return _whole(requests, cost, setting, _waves)


def refill(requests: Requests, cost: CostModel, setting: Setting) -> Trace:
  """Continuous batching: a free slot takes the next response."""
  return _whole(requests, cost, setting, rules.continuous_batching)


def window(
  requests: Requests, cost: CostModel, setting: Setting, *, window: int
) -> Trace:
  """Windows: N·G responses write at most W tokens a step each.

  Those that are cut are prefilled again and go on in the next step, those that
  ended are replaced. Tokens train in the step that writes them, with all that
  stands before them as context.

  Reference:
    Fan et al. 2025, Truncated PPO, arXiv 2506.15050.
  """
  if window < 1:
    raise ValueError(f"window must be >= 1, got {window}")
  run = _Run(requests, cost, setting)
  work = run.take(0)
  for version in range(setting.steps):
    work = work + run.take(run.batch - len(work))
    for request in work.requests:
      request.pause_at = min(request.max_tokens, request.length + window)
    run.write(work, rules.continuous_batching, version)
    run.train(work, version, windows=True)
    work = work[~work.ended]
  return run.trace(parked=0)


def over_provisioned(
  requests: Requests,
  cost: CostModel,
  setting: Setting,
  *,
  in_flight: int,
  max_staleness: float = math.inf,
  recycle: bool = True,
) -> Trace:
  """Over-provisioning: of N' groups in flight, the first N to end are trained.

  The oldest responses get slots first, and the oldest groups train first.

  Args:
    requests: lengths.
    cost: prices.
    setting: N and all else.
    in_flight: N', at least N.
    max_staleness: steps after which a response is waited for.
    recycle: what is not trained is parked and goes on in the next step; if not,
      it is thrown away, which favours short responses.

  Reference:
    Zhou et al. 2025, APRIL: active partial rollouts, arXiv 2509.18521.
  """
  if in_flight < setting.groups:
    raise ValueError(
      f"in_flight must be at least the {setting.groups} groups of a step, got"
      f" {in_flight}"
    )
  run = _Run(requests, cost, setting)
  work = run.take(0)
  for version in range(setting.steps):
    missing = in_flight * run.group_size - len(work)
    work = work + run.take(missing)
    old = (work.begun >= 0) & (version - work.begun >= max_staleness)
    rule = rules.stop_after_groups(setting.groups, awaited=np.flatnonzero(old))
    run.write(work, rule, version)
    done = np.flatnonzero(rules.complete(work.ended, work.group))
    trained = np.isin(work.group, done[: setting.groups])
    rest = work[~trained]
    thrown_away = 0 if recycle else int(rest.length.sum())
    run.train(work[trained], version, thrown_away=thrown_away)
    work = rest if recycle else run.take(0)
  return run.trace(parked=int(work.length.sum()))


def asynchronous(
  requests: Requests, cost: CostModel, setting: Setting, *, lag: float
) -> Trace:
  """Sampling and training side by side, each on its own devices.

  The trainer takes N groups as soon as so many have ended. New weights reach
  the sampler at its next step: responses are interrupted, prefilled again and
  go on, so one response may hold tokens of several versions. No trained token
  is older than `lag` steps: at version v at most N·(v + lag + 1) groups have
  been begun, and the trainer waits for those that would grow older.

  Args:
    requests: lengths.
    cost: prices of each side, see `CostModel.divided`.
    setting: N and all else.
    lag: training steps that a token may be late; 0 is synchronous, 1 is one
      step off, `math.inf` is not bounded.

  Reference:
    Fu et al. 2025, AReaL, arXiv 2505.24298 (equation 3, staleness control).
  """
  if lag < 0:
    raise ValueError(f"lag must be >= 0, got {lag}")
  run = _Run(requests, cost, setting)
  work, batch, done_s = run.take(0), None, math.inf
  version = 0
  run.slots.set_params(object(), version)
  while True:
    if batch is None:
      batch, work = _due(work, version, lag, setting.groups)
      if batch is not None:
        done_s = run.clock + cost.train_s(batch.context_length)
    more = run.take(_allowed(run, version, lag))
    run.slots.enqueue(more.requests)
    work, calls = work + more, run.slots.clock.decode_calls
    run.slots.step()
    if run.slots.clock.decode_calls == calls:
      run.wait(done_s)
    if run.clock >= done_s:
      run.train(batch, version, aside=True)
      version, batch, done_s = version + 1, None, math.inf
      if version == setting.steps:
        break
      # Responses are prefilled again under the new weights.
      run.slots.set_params(object(), version)
      for request in work.requests:
        request.fresh = 0
  return run.trace(parked=int(work.length.sum()))


def _waves(view: rules.SchedulerView) -> rules.Decision:
  """A new wave when the last one has ended."""
  return rules.Decision(insert=0 if np.any(view.active) else view.slots)


def _whole(requests, cost, setting, rule: rules.SchedulingRule) -> Trace:
  run = _Run(requests, cost, setting)
  for version in range(setting.steps):
    work = run.take(run.batch)
    run.write(work, rule, version)
    run.train(work, version)
  return run.trace(parked=0)


def _due(work: Work, version: int, lag: float, groups: int):
  """(what is to be trained now or None, the rest): overdue ones, then first."""
  names, index = np.unique(work.group.astype(int), return_inverse=True)
  whole = rules.complete(work.ended, index) if len(names) else np.zeros(0, bool)
  overdue = np.zeros(len(names), bool)
  overdue[index[(work.begun >= 0) & (work.begun <= version - lag)]] = True
  if np.sum(whole) < groups or np.any(overdue & ~whole):
    return None, work
  ended_s = np.zeros(len(names))
  np.maximum.at(ended_s, index, work.ended_s)
  order = np.lexsort((ended_s, ~overdue, ~whole))[:groups]
  chosen = np.isin(index, order)
  return work[chosen], work[~chosen]


def _allowed(run, version: int, lag: float) -> int:
  """New responses that may be begun: whole groups.

  More than fill the slots, so that the sampler sees that others wait.
  """
  quota = run.setting.groups * (version + lag + 1) - run.begun_groups
  waiting = sum(request.slot is None for request in run.slots.requests())
  lacking = 2 * run.setting.slots - waiting
  wanted = max(0, -(-lacking // run.group_size))
  return int(min(quota, wanted)) * run.group_size


class _Run:
  """Requests that come in order, and the books of the steps."""

  def __init__(self, requests: Requests, cost: CostModel, setting: Setting):
    slots_lib.check_requests(requests.prompt_lengths, requests.lengths)
    if min(setting.groups, setting.steps) < 1:
      raise ValueError(
        f"groups and steps must be >= 1, got {setting.groups} and"
        f" {setting.steps}"
      )
    self.setting, self.cost = setting, cost
    self.group_size = requests.lengths.shape[1]
    self.batch = setting.groups * self.group_size
    longest = requests.prompt_lengths.max() + requests.lengths.max()
    self.slots = slots_lib.SimulatedSlots(
      cost,
      slots=setting.slots,
      max_length=int(longest),
      group_size=self.group_size,
      page_size=setting.page_size,
    )
    self._requests = requests
    self._taken = 0
    self._rows: list[dict] = []
    self._before = dataclasses.replace(self.slots.clock)
    self._other_s = 0.0  # Training and sync as far as sampling waits for them.
    self._waited_s = 0.0

  @property
  def clock(self) -> float:
    return self.slots.clock.seconds + self._other_s + self._waited_s

  @property
  def begun_groups(self) -> int:
    return self._taken // self.group_size

  def take(self, count: int) -> Work:
    """The next responses."""
    index = np.arange(self._taken, self._taken + count)
    self._taken += count
    group, member = np.divmod(index, self.group_size)
    prompt = group % len(self._requests.lengths)
    return self.slots.make_work(
      index,
      group,
      self._requests.prompt_lengths[prompt],
      self._requests.lengths[prompt, member],
    )

  def write(self, work: Work, rule: rules.SchedulingRule, version: int) -> None:
    self.slots.write(work, rule, version=version)

  def wait(self, until_s: float) -> None:
    """The sampler has nothing to do."""
    if math.isinf(until_s):
      raise RuntimeError("sampler and trainer wait for each other")
    self._waited_s += max(0.0, until_s - self.clock)

  def train(
    self,
    work: Work,
    version: int,
    *,
    windows: bool = False,
    thrown_away: int = 0,
    aside: bool = False,
  ) -> None:
    """Trains and syncs, and closes the books of a step.

    Args:
      work: what is trained.
      version: of the weights that are trained.
      windows: only what this step wrote, with the rest as context.
      thrown_away: tokens.
      aside: training was on other devices meanwhile.
    """
    train_s = self.cost.train_s(work.context_length)
    tokens = int((work.fresh if windows else work.length).sum())
    old = (work.fresh < work.length) & (not windows)
    begun = work.begun[old]
    self._other_s += self.cost.sync_s + (0.0 if aside else train_s)
    now, before = self.slots.clock, self._before
    last_s = sum(row["wall_s"] for row in self._rows)
    self._rows.append(
      {
        "wall_s": self.clock - last_s,
        "generate_s": now.generate_s - before.generate_s,
        "prefill_s": now.prefill_s - before.prefill_s,
        "train_s": train_s,
        "sync_s": self.cost.sync_s,
        "idle_s": now.idle_s - before.idle_s + self._waited_s,
        "generated": now.tokens - before.tokens,
        "trained": tokens,
        "thrown_away": thrown_away,
        "off_policy": tokens - int(work.fresh.sum()),
        "max_staleness": int((version - begun).max(initial=0)),
        "responses": int(work.ended.sum()),
        "response_tokens": int(work.length[work.ended].sum()),
        "decode_steps": now.decode_steps - before.decode_steps,
        "peak_kv_capacity": now.peak_kv_capacity,
      }
    )
    self._other_s, self._waited_s = self._other_s + self._waited_s, 0.0
    now.peak_kv_capacity = 0
    self._before = dataclasses.replace(now)

  def trace(self, *, parked: int) -> Trace:
    columns = {k: np.array([r[k] for r in self._rows]) for k in self._rows[0]}
    return Trace(slots=self.setting.slots, parked=parked, **columns)
