"""Replay store: groups that are trained on again in later steps.

A batch with replayed groups has fewer new responses. Replayed rows keep the
versions and log-probs that they were sampled with, so that a correction can
weight them. Their sample ids are negative, which marks them as not new.

Reference: Sun et al. 2025 (DOTS with rollout replay), arXiv:2506.05316.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxrl_llm.types import Responses, is_foreign, join_rows, mixed, take_rows

# Name -> rows of a batch whose groups are stored, bool [B].
KEEP = {
  "all": lambda responses: np.ones(len(responses.rewards), bool),
  "mixed": mixed,
  "foreign": lambda responses: mixed(responses) & is_foreign(responses.rollout),
}


@dataclasses.dataclass(frozen=True)
class Replay:
  """Draws groups from a store and adds to it; the store is a plain value.

  Attributes:
    groups: number of groups of a batch that are replayed, once that many are
      stored; at least 1.
    capacity: maximum number of stored groups; the oldest ones are evicted.
    keep: which groups are stored, a key of `KEEP`.
    seed: seed of the draws.
    feed: exchanges responses with other policies, see `methods.sapo.Swarm`.
  """

  groups: int
  capacity: int
  keep: str
  seed: int
  feed: Any = None

  def draw(self, store: Responses | None, step: int) -> Responses | None:
    """Returns the groups to replay; None until enough are stored.

    Args:
      store: the stored groups.
      step: a number that is unique to this draw.
    """
    stored = [] if store is None else np.unique(store.rollout.group_id)
    if len(stored) < self.groups:
      return None
    rng = np.random.default_rng((self.seed, step))
    chosen = rng.choice(stored, self.groups, replace=False)
    rows = take_rows(store, np.isin(store.rollout.group_id, chosen))
    ids = -1 - rows.rollout.sample_id
    return rows.replace(rollout=rows.rollout.replace(sample_id=ids))

  def add(
    self, store: Responses | None, responses: Responses
  ) -> Responses | None:
    """Returns the store with the groups of a new batch added."""
    kept = take_rows(responses, KEEP[self.keep](responses))
    if not len(kept.rewards):
      return store
    joined = join_rows([store, kept])
    group = joined.rollout.group  # Numbered in the order of insertion.
    return take_rows(joined, group >= group.max() + 1 - self.capacity)

  def complete(
    self, store: Responses | None, batch: Responses
  ) -> Responses | None:
    """Returns stored rows to add to the groups of a new batch, or None.

    Here None: this class replays entire groups.

    Args:
      store: the stored responses.
      batch: judged responses of complete groups.
    """
