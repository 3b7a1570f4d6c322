"""Runs the engine's scheduler with programs that only advance a clock.

Queue, slots, pages and rules come from `jaxrl_llm.sampling`; no token is
computed, and time is simulated.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import sampling
from jaxrl_llm.rewards.judge import Judged
from jaxrl_llm.rollout.writer import ResponseWriter, Weights
from jaxrl_llm.sampling import requests as requests_lib
from jaxrl_llm.sampling.paged_cache import PagedCache, Programs
from jaxrl_llm.sampling.requests import Request, Rows, SamplingParams
from jaxrl_llm.sampling.rules import SchedulingRule
from jaxrl_llm.sampling.scheduler import Scheduler, TurnHook
from jaxrl_llm.sampling.slots import DecodeOutput
from jaxrl_llm.sampling.speculation import AdaptiveSpeculation
from jaxrl_llm.tools.simulate.cost import CostModel
from jaxrl_llm.tools.simulate.lengths import Requests
from jaxrl_llm.types import Responses, Rollout, Status, unjudged

# A placeholder config: simulated rows have lengths but no tokens.
_NARROW = sampling.EngineConfig(1, 1, 1, stop_tokens=())


class SimulatedRequest(Request):
  """A response with a known length but no tokens.

  Its row is [1, 1] and only contains the version of the first token.
  """

  def context(self) -> np.ndarray:
    """Returns nonzero placeholders, equal if and only if contexts are equal."""
    row, tokens = self.row, np.ones(self.context_length, np.int32)
    tokens[0] = -1 - row.sample_id[0] if self.length else 1 + row.group_id[0]
    return tokens

  def append(self, output: DecodeOutput, slot: int, *, version: int) -> int:
    """Records the number of new tokens of a slot, and returns it."""
    row, count = self.row, int(output.count[slot])
    if not self.length:
      row.version[0], row.mask[0] = version, True
    row.lengths[0] += count
    row.status[0] = output.status[slot]
    self.position += count
    return count


class SimulatedEngine(Scheduler):
  """The scheduler of an engine on a simulated clock.

  Attributes:
    asked: the requests; a response is identified by its index.
    cost: prices of the programs.
    seconds: time on the simulated clock.
  """

  def __init__(
    self,
    requests: Requests,
    cost: CostModel,
    config: sampling.EngineConfig,
    rule: SchedulingRule | None = None,
  ):
    """Makes an engine without requests.

    Args:
      requests: lengths of prompts and responses.
      cost: prices of the programs.
      config: config of the engine.
      rule: scheduling rule that overrides the rules of calls.
    """
    self.asked, self.cost, self._rule = requests, cost, rule
    self.seconds = 0.0
    group_size = requests.lengths.shape[1]
    self._params = SamplingParams(sampling.SamplingSettings(), None, group_size)
    nothing = lambda *_: ()
    programs = Programs(*[nothing] * len(Programs._fields))._replace(
      prefill=self._charge_prefill, decode=self._charge_decode
    )
    super().__init__(
      config,
      _Cache(programs, config, sharding=None, shares_pages=False),
      speculation=AdaptiveSpeculation(0),
      detokenize=None,
      clock=lambda: self.seconds,
    )

  def add(
    self, rollout: Rollout, *, window: int = 0, **options: Any
  ) -> list[Request]:
    """See `Engine.add`; a window of 0 is unbounded, and options are ignored."""
    lengths = self.asked.lengths.reshape(-1)
    limits = lengths[rollout.sample_id % lengths.size]
    window = window or int(lengths.max())
    plain = requests_lib.make_requests(rollout, self._params, limits, window)
    requests = [SimulatedRequest(**vars(request)) for request in plain]
    self.enqueue(requests)
    return requests

  def run(
    self,
    requests: Iterable[Request],
    rule: SchedulingRule,
    turns: TurnHook | None = None,
  ) -> None:
    """See `Scheduler.run`; the engine's rule, if any, takes precedence."""
    super().run(requests, self._rule or rule, turns)

  def _decode(
    self, begun: float, prefilled: sampling.EngineStats
  ) -> list[Request]:
    self.seconds += self.cost.scheduler_step_s  # Host time.
    return super()._decode(begun, prefilled)

  def _charge_prefill(self, params: Any, tokens: np.ndarray) -> tuple:
    contexts = np.count_nonzero(tokens, axis=1)
    self.seconds += self.cost.prefill_s(contexts, calls=1)
    return ()

  def _charge_decode(self, rows: Rows, min_active: int) -> DecodeOutput:
    """Charges at most a page of steps, until fewer than `min_active` remain."""
    column = lambda of: np.asarray([0 if r is None else of(r) for r in rows])
    left = column(lambda r: r.pause_at - r.length)
    limit = column(lambda r: r.max_tokens - r.length)
    most = np.sort(left[left > 0])[-min_active]
    steps = int(min(self.config.page_size, most))
    if self.cost.padded:
      tokens = self.config.page_size * column(lambda r: len(r.pages)).sum()
      seconds = steps * self.cost.decode_s(len(rows), tokens)
    else:
      step = np.arange(steps)[:, None]
      writing = step < left
      context = (column(lambda r: r.context_length) + step) * writing
      slots, tokens = writing.sum(axis=1), context.sum(axis=1)
      seconds = self.cost.decode_s(slots, tokens).sum()
    self.seconds += float(seconds)
    count = np.minimum(left, steps)
    status = np.where(count < limit, Status.TRUNCATED, Status.OVERLONG)
    steps = np.full(len(rows), steps)
    return DecodeOutput(None, None, count, steps, left > steps, status)


class _Cache(PagedCache):
  """A cache that passes the requests to the decode program."""

  def decode(self, rows: Rows, metadata: Any, min_active: int, draft: int):
    return self.programs.decode(rows, min_active)


class SimulatedWriter(ResponseWriter):
  """Writer and prompt source of a `RolloutWorker`; gives no verdicts.

  Prompts are consecutive numbers; lengths repeat after the last request.
  """

  has_several_sources = False  # See `PromptSource`.

  def __init__(self, engine: SimulatedEngine):
    """Makes a writer of the engine's requests."""
    super().__init__(
      engine,
      sampling.SamplingSettings(),
      key=None,
      group_size=engine.asked.lengths.shape[1],
      judge=lambda rollout, prompts, _: Judged(
        unjudged(rollout), prompts, texts=[], verdicts=[]
      ),
    )

  def draw(self, drawn: int, n: int) -> tuple[Sequence[int], int]:
    """See `PromptSource.draw`; returns the next n prompts."""
    return range(drawn, drawn + n), drawn + n

  def prompt(self, example_id: int, group_id: int) -> int:
    """See `PromptSource.prompt`."""
    return group_id

  def again(self, drawn: int, judged: Judged) -> tuple[Sequence[int], int]:
    """See `PromptSource.again`."""
    return (), drawn

  def observe(self, drawn: int, responses: Responses) -> int:
    """See `PromptSource.observe`."""
    return drawn

  def sizes(self, prompts: Sequence[int]) -> Sequence[int]:
    """See `ResponseWriter.sizes`."""
    return [self.group_size] * len(prompts)

  def begin(self, prompts: Sequence[int], sample_ids: np.ndarray) -> Rollout:
    """See `ResponseWriter.begin`."""
    tokens, lengths = [[0]] * len(prompts), self.engine.asked.prompt_lengths
    rollout = sampling.new_requests(tokens, sample_ids, prompts, _NARROW)
    rollout.prompt_lengths[:] = lengths[rollout.group_id % len(lengths)]
    return rollout


def predict(
  requests: Requests,
  cost: CostModel,
  config: sampling.EngineConfig,
  *,
  rule: SchedulingRule = sampling.continuous_batching,
) -> sampling.EngineStats:
  """Predicts the cost of generating responses of given lengths.

  Counters equal those of the engine, and seconds are comparable with it. Stop
  strings, speculation and several shards are not simulated.

  Args:
    requests: N prompts and the lengths of their responses.
    cost: prices, see `fit`.
    config: config of the engine.
    rule: scheduling rule.
  """
  engine = SimulatedEngine(requests, cost, config)
  writer, prompts = SimulatedWriter(engine), range(len(requests.lengths))
  rollout = writer.begin(prompts, requests.sample_ids(prompts))
  writer.write(rollout, Weights(object()), rule=rule)
  return engine.last_stats
