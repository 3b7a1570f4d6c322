"""The one way to write responses and to have them judged.

Training, evaluation and generation differ in whose prompts they ask, in when a
call stops, and in what becomes of the responses.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import chex

from jaxrl_llm import sampling
from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rollout.turns import Conversations, Turns, TurnTaking
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.types import Rollout, Status, join_rows


@dataclasses.dataclass(frozen=True)
class Weights:
  """What the sampler writes with: parameters, their version, and statistics."""

  params: Any
  version: int = 0
  temperature_state: Any = None  # Of the adaptive temperature; None without.


@dataclasses.dataclass(frozen=True)
class ResponseWriter:
  """An engine with all that its responses have in common.

  Attributes:
    engine: writes.
    settings: of every response.
    key: stays the same for the whole run; a response folds in its number.
    group_size: responses of a prompt, as a rule.
    judge: of what has ended; None where nobody asks for verdicts.
    turn_taking: how responses talk to an environment; None: there is none.
  """

  engine: sampling.Engine
  settings: sampling.SamplingSettings
  key: chex.PRNGKey
  group_size: int
  judge: Judge | None = None
  turn_taking: TurnTaking | None = None

  def begin(
    self, prompts: Sequence[Prompt], sample_ids: Sequence[Sequence[int]]
  ) -> Rollout:
    """Responses without a token yet, so many to each prompt as it has ids."""
    return sampling.new_requests(
      [prompt.tokens for prompt in prompts],
      sample_ids,
      [prompt.group_id for prompt in prompts],
      self.engine.config,
      example_ids=[prompt.example_id for prompt in prompts],
    )

  def write(
    self,
    rollout: Rollout,
    weights: Weights,
    *,
    window: int | None = None,
    rule: sampling.rules.SchedulingRule = sampling.continuous_batching,
    conversations: Conversations | None = None,
    arrived: Callable[[Rollout], None] | None = None,
  ) -> Rollout:
    """Responses written on, see `Engine.generate_window`.

    Args:
      rollout: rows that have not ended.
      weights: that everything new is written with.
      window: most new tokens of a response; None sets no bound.
      rule: who gets a slot when, and when the call ends.
      conversations: of the rows, written to in place; where there is an
        environment.
      arrived: told of every group when its last response has ended.
    """
    with contextlib.ExitStack() as stack:
      hooks = []
      if self.turn_taking is not None:
        talk = Turns(self.turn_taking, conversations, self.engine.answer)
        hooks.append(stack.enter_context(talk))
      if arrived is not None:
        hooks.append(Arrivals(self.group_size, arrived))
      turns = lambda left: any([hook(left) for hook in hooks])
      return self.engine.generate_window(
        weights.params,
        rollout,
        group_size=self.group_size,
        window=window or self.engine.config.max_response_length,
        key=self.key,
        settings=self.settings,
        version=weights.version,
        rule=rule,
        temperature_state=weights.temperature_state,
        turns=turns if hooks else None,
      )

  def close(self) -> None:
    """Ends the processes that environments run in."""
    if self.turn_taking is not None:
      self.turn_taking.ask.close()

  def conversations(
    self, prompts: Sequence[Prompt], sample_ids: Sequence[Sequence[int]]
  ) -> Conversations:
    """Those of new responses; none without an environment."""
    if self.turn_taking is None:
      return {}
    return {
      str(number): self.turn_taking.begin(prompt)
      for prompt, numbers in zip(prompts, sample_ids)
      for number in numbers
    }


class Arrivals:
  """A hook of the scheduler that tells of groups which have ended."""

  def __init__(self, group_size: int, tell: Callable[[Rollout], None]):
    """Knows of none yet.

    Args:
      group_size: responses of a group.
      tell: takes the rows of a group.
    """
    self._group_size, self._tell = group_size, tell
    # Left their slots, some of them for the environment's answer; a request
    # of several turns leaves several times.
    self._left: dict[Request, None] = {}
    self._ended = collections.defaultdict(list)

  def __call__(self, left: Sequence[Request]) -> bool:
    """Takes requests that left their slots; some of them may come back."""
    self._left |= dict.fromkeys(left)
    over = [r for r in self._left if r.row.status[0] != Status.TRUNCATED]
    for request in over:
      del self._left[request]
      group = self._ended[int(request.row.group_id[0])]
      group.append(request.row)
      if len(group) == self._group_size:
        self._tell(join_rows(sorted(group, key=lambda row: row.sample_id[0])))
    return False
