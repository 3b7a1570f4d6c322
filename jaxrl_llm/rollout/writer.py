"""Samples and judges responses, for training, evaluation and generation.

These differ in their prompts, in when a call stops, and in how the responses
are used.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import numpy as np

from jaxrl_llm import sampling
from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rollout.engine import RolloutEngine
from jaxrl_llm.rollout.turns import ConversationConfig, Conversations, TurnHook
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.types import Origin, Rollout, Status, join_rows


@dataclasses.dataclass(frozen=True)
class Weights:
  """The sampler's parameters, and functions of the learner's state."""

  params: Any
  version: int = 0
  processor_states: Mapping[str, Any] | None = None  # By processor.
  # (name of an input, responses) -> [B, T], computed by the learner's models.
  read: Callable[[str, Rollout], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class ResponseWriter:
  """An engine with the settings that all its responses share.

  Attributes:
    engine: samples the responses.
    settings: sampling parameters of every response.
    key: random key of the run; a response folds in its sample id.
    group_size: usual number of responses per prompt.
    judge: judges ended responses; None if no verdicts are needed.
    turn_taking: conversations with an environment; None without one.
  """

  engine: RolloutEngine
  settings: sampling.SamplingSettings
  key: chex.PRNGKey
  group_size: int
  judge: Judge | None = None
  turn_taking: ConversationConfig | None = None

  def sizes(self, prompts: Sequence[Prompt]) -> list[int]:
    """Returns the number of responses to each prompt.

    Raises:
      InputError: The number is negative.
    """
    for prompt in prompts:
      if prompt.tries < 0:
        raise InputError(
          f"prompt {prompt.id!r} has tries={prompt.tries}; give the number of"
          " its responses, or 0 for data.group_size"
        )
    return [prompt.tries or self.group_size for prompt in prompts]

  def begin(
    self, prompts: Sequence[Prompt], sample_ids: Sequence[Sequence[int]]
  ) -> Rollout:
    """Returns the initial rows, one per sample id of each prompt.

    A demonstrated response is complete; the others have not ended.

    Raises:
      InputError: An opening leaves no room for a token, or a demonstrated
        response does not say which of its tokens carry loss.
    """
    rows = sampling.new_requests(
      [prompt.tokens for prompt in prompts],
      sample_ids,
      [prompt.group_id for prompt in prompts],
      self.engine.config,
      example_ids=[prompt.example_id for prompt in prompts],
    )
    openings = [p for p, ids in zip(prompts, sample_ids) for _ in ids]
    for row, prompt in enumerate(openings):
      given = len(prompt.demonstrated)
      room = rows.tokens.shape[1] - (not given)
      if (length := len(prompt.opening)) > room:
        raise InputError(
          f"prompt {prompt.id!r} has an opening of {length} tokens, but only"
          f" {room} leave room for a response; shorten it or raise"
          " sampler.max_response_length"
        )
      if given not in (0, length):
        raise InputError(
          f"prompt {prompt.id!r} has a response of {length} tokens, but marks"
          f" {given} of them (Prompt.demonstrated); mark each one"
        )
      rows.tokens[row, :length] = prompt.opening
      rows.origin[row, :length] = int(Origin.FOREIGN)
      rows.lengths[row] = length
      if given:
        rows.mask[row, :length] = prompt.demonstrated
        rows.status[row] = int(Status.FINISHED)
    return rows

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
    """Continues responses; see `Engine.generate_window`.

    Args:
      rollout: rows that have not ended.
      weights: weights for all new tokens.
      window: maximum number of new tokens per response; None sets no limit.
      rule: the scheduling rule.
      conversations: conversations of the rows, updated in place; only with an
        environment.
      arrived: called with each group when its last response has ended.
    """
    with contextlib.ExitStack() as stack:
      hooks = []
      if self.turn_taking is not None:
        talk = TurnHook(self.turn_taking, conversations, self.engine.answer)
        hooks.append(stack.enter_context(talk))
      if arrived is not None:
        sizes = collections.Counter(rollout.group_id.tolist())
        hooks.append(Arrivals(sizes, arrived))
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
        processor_states=weights.processor_states,
        turns=turns if hooks else None,
      )

  def close(self) -> None:
    """Stops the processes that run environments."""
    if self.turn_taking is not None:
      self.turn_taking.call.close()

  def conversations(
    self, prompts: Sequence[Prompt], sample_ids: Sequence[Sequence[int]]
  ) -> Conversations:
    """Returns new conversations by sample id; none without an environment."""
    if self.turn_taking is None:
      return {}
    return {
      str(number): self.turn_taking.begin(prompt)
      for prompt, numbers in zip(prompts, sample_ids)
      for number in numbers
    }


class Arrivals:
  """Scheduler hook that hands over completed groups."""

  def __init__(self, sizes: Mapping[int, int], tell: Callable[[Rollout], None]):
    """Makes the hook.

    Args:
      sizes: number of responses by group id.
      tell: called with the rows of each completed group.
    """
    self._sizes, self._tell = sizes, tell
    # Requests that left their slots, some only until the environment replies: a
    # request with several turns leaves several times.
    self._left: dict[Request, None] = {}
    self._ended = collections.defaultdict(list)

  def __call__(self, left: Sequence[Request]) -> bool:
    """Adds requests that left their slots, to which they may return."""
    self._left |= dict.fromkeys(left)
    over = [r for r in self._left if r.row.status[0] != Status.TRUNCATED]
    for request in over:
      del self._left[request]
      group_id = int(request.row.group_id[0])
      group = self._ended[group_id]
      group.append(request.row)
      if len(group) == self._sizes[group_id]:
        self._tell(join_rows(sorted(group, key=lambda row: row.sample_id[0])))
    return False
