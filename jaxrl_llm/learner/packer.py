"""Cuts batches into packed mini-batches of each member's own size."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from jaxrl_llm import types
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.members import Member
from jaxrl_llm.learner.packing import MiniBatch
from jaxrl_llm.types import Responses, Rollout

View = Callable[[Rollout], Rollout]  # With the same responses.
MiniBatches = dict[str, list[MiniBatch]]  # By member.


@dataclasses.dataclass(frozen=True)
class Packer:
  """Cuts batches for the members of a learner.

  Attributes:
    members: members by name, including the policy.
    capacity: tokens per packed row.
    views: functions of the samples that a member reads, by member; without one
      it reads what the policy does.
  """

  members: Mapping[str, Member]
  capacity: int
  views: Mapping[str, View] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def waits(self) -> frozenset[str]:
    """Names of members with `Training.waits`."""
    return frozenset(k for k, x in self.members.items() if x.training.waits)

  @functools.cached_property
  def size(self) -> int:
    """Least common multiple of their mini-batch sizes; 0 without any."""
    sizes = [self.members[name].settings.mini_batch for name in self.waits]
    return int(np.lcm.reduce(sizes)) if sizes else 0

  @functools.cached_property
  def _room(self) -> int:
    """Tokens of the largest micro-batch of all members."""
    rows = max(x.settings.micro_batch_size for x in self.members.values())
    return rows * self.capacity

  def batch(
    self,
    responses: Responses,
    waiting: Responses | None,
    rng: np.random.Generator,
  ) -> tuple[Responses, MiniBatches, Responses | None]:
    """Packs a complete batch, shuffled.

    Args:
      responses: the batch, all of it with new tokens for the policy.
      waiting: earlier responses for the members that wait.
      rng: random generator of the order.

    Returns:
      The batch with the earlier responses that are used now, its mini-batches,
      and the responses that wait for the next batch.
    """
    fresh, found = np.arange(len(responses.rewards)), {}
    joined, ended, waiting = self.with_waiting(responses, waiting)
    for name in self.members:
      rows = ended if name in self.waits else fresh
      found[name] = self.mini_batches(name, joined.rollout, rows, rng)
      check_rows(found[name], rows)
    return joined, found, waiting

  def with_waiting(
    self, responses: Responses, waiting: Responses | None
  ) -> tuple[Responses, np.ndarray, Responses | None]:
    """Returns the batch, rows for members that wait, and the waiting responses.

    Mini-batches are whole and take the oldest responses first: in a smaller
    one, each response would weigh more.
    """
    batch, rows = responses, np.flatnonzero(responses.ended)
    if not self.size:
      return batch, rows[:0], None
    if waiting is not None:
      batch = types.join_rows([responses, waiting])
      waited = np.arange(len(responses.rewards), len(batch.rewards))
      rows = np.append(waited, rows)
    learned, left = np.split(rows, [len(rows) // self.size * self.size])
    waiting = types.take_rows(batch, left)
    # The policy has been trained on all of their tokens.
    rollout = waiting.rollout
    rollout = rollout.replace(window_start=rollout.lengths)
    waiting = waiting.replace(rollout=rollout) if left.size else None
    return batch if learned.size else responses, learned, waiting

  def mini_batches(
    self,
    name: str,
    rollout: Rollout,
    rows: np.ndarray,
    rng: np.random.Generator | None = None,
  ) -> list[MiniBatch]:
    """Packs mini-batches of a member's size, shuffled by `rng`."""
    member = self.members[name]
    return packing.mini_batches(
      self._seen(name, rollout),
      size=member.settings.mini_batch,
      rng=rng,
      capacity=self.capacity,
      rows=member.settings.micro_batch_size,
      chosen=rows,
      share=member.fns.shares_prompts,
    )

  def _seen(self, name: str, rollout: Rollout) -> Rollout:
    return self.views[name](rollout) if name in self.views else rollout

  def completed(
    self, name: str, rollout: Rollout, mini_batches: list[MiniBatch]
  ) -> list[MiniBatch]:
    """Adds mini-batches of the remaining rows."""
    rows = np.arange(len(rollout.lengths))
    for batch in mini_batches:
      rows = np.setdiff1d(rows, batch.rows)
    return mini_batches + self.mini_batches(name, rollout, rows)

  def joined(self, arriving: Iterable[Responses]) -> Iterator[Responses]:
    """Joins groups until they fill a micro-batch, except for the last ones.

    Gradients of fewer tokens would cost as much. Only lengths decide, so that a
    repeated run joins the same groups.
    """
    gathered, tokens = [], 0
    for responses in arriving:
      tokens += max(self._tokens(x, responses.rollout) for x in self.members)
      gathered.append(responses)
      if tokens >= self._room:
        yield types.join_rows(gathered)
        gathered, tokens = [], 0
    if gathered:
      yield types.join_rows(gathered)

  def _tokens(self, name: str, rollout: Rollout) -> int:
    """Returns the tokens of a group in packed rows of a member."""
    share = self.members[name].fns.shares_prompts
    seen = self._seen(name, rollout)
    _, lengths = packing.make_units(seen, self.capacity, share=share)
    return sum(lengths)

  def part(self, responses: Responses) -> tuple[Responses, MiniBatches, None]:
    """Packs a result of `joined` as one mini-batch of a fixed shape.

    Returns the same as `batch`; no responses wait.
    """
    found = {}
    for name, member in self.members.items():
      rollout = self._seen(name, responses.rollout)
      longest = rollout.prompt_tokens.shape[1] + rollout.tokens.shape[1]
      most = self._room + longest * np.bincount(rollout.group).max()
      # First-fit leaves at most one row half empty.
      most_rows = 1 + 2 * most // self.capacity
      rows = member.settings.micro_batch_size
      layout = packing.make_layout(
        rollout,
        capacity=self.capacity,
        rows=rows,
        micro_batches=-(-most_rows // rows),
        share=member.fns.shares_prompts,
      )
      every = np.arange(len(rollout.lengths))
      found[name] = [MiniBatch(every, layout, rollout)]
    return responses, found, None


def check_rows(batches: list[MiniBatch], rows: np.ndarray) -> None:
  """Checks that mini-batches contain each row exactly once."""
  held = np.concatenate([rows[:0], *(batch.rows for batch in batches)])
  if not np.array_equal(np.sort(held), np.sort(rows)):
    raise RuntimeError(
      f"{len(rows)} responses are to be trained on once, but mini-batches hold"
      f" {len(held)}, {len(np.unique(held))} of them different"
    )
