"""Splits batches into packed mini-batches for each member."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from jaxrl_llm import types
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.members import Member
from jaxrl_llm.learner.packing import MiniBatch
from jaxrl_llm.types import Responses, Rollout

View = Callable[[Rollout], Rollout]  # Keeps the responses.
MiniBatches = dict[str, list[MiniBatch]]  # By member.


@dataclasses.dataclass(frozen=True)
class Packer:
  """Splits batches into mini-batches for the members of a learner.

  Attributes:
    members: members by name, including the policy.
    share: member -> whether samples of a group share their prompt.
    capacity: tokens per packed row.
    temperature: sampling temperature.
    views: member -> function that returns the samples as the member reads them;
      a member without a view reads the policy's samples.
  """

  members: Mapping[str, Member]
  share: Mapping[str, bool]
  capacity: int
  temperature: float
  views: Mapping[str, View] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def waits(self) -> frozenset[str]:
    """Names of members with `Training.waits`."""
    return frozenset(k for k, x in self.members.items() if x.training.waits)

  @functools.cached_property
  def size(self) -> int:
    """Least common multiple of the mini-batch sizes of `waits`; 0 if empty."""
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
    """Packs a complete batch into shuffled mini-batches.

    Args:
      responses: a batch in which every response has new tokens for the policy.
      waiting: earlier responses for the members in `waits`.
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
    """Returns the batch, rows for members in `waits`, and remaining responses.

    Mini-batches are full and take the oldest responses first: in a smaller
    mini-batch, each response would have a larger weight.
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
    # The policy has already been trained on all tokens of these responses.
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
      share=self.share[name],
      temperature=self.temperature,
    )

  def _seen(self, name: str, rollout: Rollout) -> Rollout:
    return self.views[name](rollout) if name in self.views else rollout

  def completed(
    self, name: str, rollout: Rollout, mini_batches: list[MiniBatch]
  ) -> list[MiniBatch]:
    """Returns the mini-batches with further ones of the remaining rows."""
    rows = np.arange(len(rollout.lengths))
    for batch in mini_batches:
      rows = np.setdiff1d(rows, batch.rows)
    return mini_batches + self.mini_batches(name, rollout, rows)

  def joined(self, arriving: Iterable[Responses]) -> Iterator[Responses]:
    """Joins groups until they fill a micro-batch; the last ones may not.

    Gradients of fewer tokens would cost as much. The decision depends only on
    lengths, so that a repeated run joins the same groups.
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
    """Returns the number of tokens of groups in packed rows of a member."""
    seen, share = self._seen(name, rollout), self.share[name]
    _, lengths = packing.make_units(seen, self.capacity, share=share)
    return sum(lengths)

  def part(self, responses: Responses) -> tuple[Responses, MiniBatches, None]:
    """Packs groups from `joined` as one mini-batch of a fixed shape.

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
        share=self.share[name],
      )
      every = np.arange(len(rollout.lengths))
      share = len(every) / member.settings.mini_batch
      made = MiniBatch(every, layout, rollout, share, self.temperature)
      found[name] = [made]
    return responses, found, None


def check_rows(batches: list[MiniBatch], rows: np.ndarray) -> None:
  """Checks that the mini-batches contain each row exactly once."""
  held = np.concatenate([rows[:0], *(batch.rows for batch in batches)])
  if not np.array_equal(np.sort(held), np.sort(rows)):
    raise RuntimeError(
      f"mini-batches must contain each of {len(rows)} responses once, but"
      f" contain {len(held)}, {len(np.unique(held))} of them distinct"
    )
