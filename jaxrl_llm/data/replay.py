"""Groups that are trained on again in later steps.

A batch then has fewer new responses. Replayed rows keep the versions and the
log-probs that they were sampled with, so that a correction can weigh them.
Their sample ids are negative, since each response is handed over once.

Reference: Sun et al. 2025 (DOTS with rollout replay), arXiv:2506.05316.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxrl_llm.system.plugin import Table
from jaxrl_llm.types import Responses, is_foreign, join_rows, mixed, take_rows

# Name -> rows of a batch whose groups are stored, bool [B].
KEEP = {
  "all": lambda responses: np.ones(len(responses.rewards), bool),
  "mixed": mixed,
  "foreign": lambda responses: mixed(responses) & is_foreign(responses.rollout),
}


@dataclasses.dataclass(frozen=True)
class Replay:
  """Draws groups from a store, which is a value, and adds to it.

  Attributes:
    groups: groups of a batch that are replayed, once so many are stored; at
      least 1.
    capacity: groups in the store; the oldest ones leave first.
    keep: which groups are stored, one of `KEEP`.
    seed: seed of the draws.
    feed: exchanges responses with other policies, one of `FEEDS`.
  """

  groups: int
  capacity: int
  keep: str
  seed: int
  feed: Any = None

  def draw(self, store: Responses | None, step: int) -> Responses | None:
    """Returns replayed groups; None until there are enough.

    Args:
      store: the stored groups.
      step: any number that no other draw has.
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
    """Returns the store with a batch of new groups."""
    kept = take_rows(responses, KEEP[self.keep](responses))
    if not len(kept.rewards):
      return store
    joined = join_rows([store, kept])
    group = joined.rollout.group  # In the order in which they were added.
    return take_rows(joined, group >= group.max() + 1 - self.capacity)

  def complete(
    self, store: Responses | None, batch: Responses
  ) -> Responses | None:
    """Returns stored rows that a batch of new groups lacks, or None.

    Groups that are drawn whole leave nothing to complete.

    Args:
      store: the stored responses.
      batch: judged responses of whole groups.
    """
    del store, batch


# Name -> which groups of a batch the store provides for.
REPLAYS = Table("replay", any=Replay)

# Setting that switches it on -> (config group schedule) -> what exchanges
# responses with other policies, see `methods.sapo.Swarm`.
FEEDS = Table("feed")
