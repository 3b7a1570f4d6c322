"""Records that are passed between the parts of the library.

Conventions: B rows (one per sampled response), P padded prompt length, T padded
response length. Everything about RL is response-aligned: index t is the t-th
response token, and `values[:, t]` is V(state before token t).
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import chex
import jax
import numpy as np


class Status(enum.IntEnum):
  """The state in which the sampler left a response."""

  FINISHED = 0  # The model emitted a stop token: the episode ended.
  OVERLONG = 1  # The response hit its hard maximum: the episode ended.
  # The sampler call ended first: the response continues in a later step.
  # (TRL and verl call OVERLONG responses truncated.)
  TRUNCATED = 2
  STOPPED = 3  # Dropped by a schedule: it neither ended nor continues.


class Origin(enum.IntEnum):
  """The author of a response token; FOREIGN tokens have no log-probs."""

  POLICY = 0
  FOREIGN = 1  # A tool, a hint or the data.
  OTHER = 2  # Another policy, whose log-probs are known.


@chex.dataclass(frozen=True)
class Rollout:
  """Sampled responses. Arrays only; text never enters the training path."""

  prompt_tokens: chex.Array  # int32 [B, P], right-padded.
  prompt_lengths: chex.Array  # int32 [B].
  tokens: chex.Array  # int32 [B, T], response tokens, stop token included.
  lengths: chex.Array  # int32 [B], response tokens present.
  mask: chex.Array  # bool [B, T], True where a response token may carry loss.
  # float32 [B, T], under the distribution sampled from.
  behavior_logprobs: chex.Array
  version: chex.Array  # int32 [B, T], policy version that wrote the token.
  origin: chex.Array  # int8 [B, T], an `Origin` per token.
  # float32 [B, T], environment reward of the turn that ends here.
  turn_rewards: chex.Array
  status: chex.Array  # int32 [B], a `Status` per response.
  window_start: chex.Array  # int32 [B], first token generated in this step.
  example_id: chex.Array  # int32 [B], row of the data.
  group_id: chex.Array  # int32 [B], draw of the prompt, unique in the run.
  group: chex.Array  # int32 [B], index of the group among these rows.
  sample_id: chex.Array  # int32 [B], unique in the run; seeds the response.
  # int [B, T, layers · k], experts that the sampler chose at the position that
  # predicted the token, -1 where there is none; with routing replay only.
  choices: chex.Array | None = None


@chex.dataclass(frozen=True)
class Responses:
  """A rollout with its verdicts; NumPy arrays of B rows."""

  rollout: Rollout
  rewards: chex.Array  # float32 [B]; 0 while unfinished.
  correct: chex.Array  # bool [B]; False while unfinished.
  judged: chex.Array  # bool [B]; False where the reward failed.
  # Name -> float32 [B]: parts of the reward; NaN where missing.
  parts: dict[str, chex.Array] = dataclasses.field(default_factory=dict)

  @property
  def ended(self) -> np.ndarray:
    """bool [B]: True if the response is finished or overlong."""
    return ended(self.rollout)


class Pruning(NamedTuple):
  """A rule that drops unfinished responses by a model's prediction."""

  at: int  # New tokens of a response after which it may be dropped.
  reads: str  # Input [B, T] that a model of the learner computes.
  # (B unfinished responses, the input) -> responses to drop, bool [B].
  drop: Callable[[Rollout, np.ndarray], np.ndarray]


# The inputs of an algorithm by name: arrays [B, T] or [B].
Experience = dict[str, chex.Array]


def ended(rollout: Rollout) -> np.ndarray:
  """Returns responses that are finished or overlong, bool [B]."""
  return np.isin(rollout.status, (int(Status.FINISHED), int(Status.OVERLONG)))


def is_over(rollout: Rollout) -> np.ndarray:
  """Returns responses that have ended or were dropped, bool [B]."""
  return np.asarray(rollout.status) != int(Status.TRUNCATED)


def mixed(responses: Responses) -> np.ndarray:
  """Returns rows whose group has correct and incorrect responses, bool [B].

  Verdicts count, not shaped rewards: groups that differ only in length teach
  nothing about the task. Responses without a verdict are neither correct nor
  incorrect.
  """
  group, correct = responses.rollout.group, responses.correct
  judged = responses.judged
  right = np.bincount(group, correct & judged)
  wrong = np.bincount(group, ~correct & judged)
  return ((right > 0) & (wrong > 0))[group]


def sampled_by(rollout: Rollout, version: int) -> np.ndarray:
  """Returns the tokens that a version of the policy sampled, bool [B, T]."""
  own = rollout.mask & (rollout.origin == Origin.POLICY)
  return own & (rollout.version == version)


def is_foreign(rollout: Rollout) -> np.ndarray:
  """Returns responses that another policy wrote, bool [B]."""
  return rollout.origin[:, 0] == int(Origin.OTHER)


def is_demonstrated(rollout: Rollout) -> np.ndarray:
  """Returns responses that come entirely from the data, bool [B]."""
  present = np.arange(rollout.tokens.shape[1]) < rollout.lengths[:, None]
  own = (present & (rollout.origin != Origin.FOREIGN)).any(axis=1)
  return (rollout.status == Status.FINISHED) & ~own


def too_old(rollout: Rollout, version: int, max_staleness: int) -> np.ndarray:
  """Returns rows of groups that have reached a staleness, int [n].

  A group has if a first token is at least `max_staleness` updates old. Given
  tokens, with which a response may begin, have no age.
  """
  first = np.argmax(rollout.mask, axis=1)
  age = version - rollout.version[np.arange(first.size), first]
  old = rollout.mask.any(axis=1) & (age >= max_staleness)
  return np.flatnonzero(np.isin(rollout.group_id, rollout.group_id[old]))


def unjudged(rollout: Rollout) -> Responses:
  """Returns responses without a verdict."""
  rows = len(rollout.lengths)
  return Responses(
    rollout=rollout,
    rewards=np.zeros(rows, np.float32),
    correct=np.zeros(rows, bool),
    judged=np.ones(rows, bool),
  )


def take_rows(record: chex.ArrayTree, rows: chex.Array) -> chex.ArrayTree:
  """Returns the given rows of a record, by index or mask.

  A mask that selects all rows copies nothing.
  """
  is_mask = isinstance(rows, np.ndarray) and rows.dtype == np.bool_
  if is_mask and rows.all():
    return jax.tree.map(np.asarray, record)
  return jax.tree.map(lambda x: np.asarray(x)[rows], record)


def join_rows(
  parts: Sequence[chex.ArrayTree | None], *, copy: bool = True
) -> chex.ArrayTree:
  """Concatenates records along the row axis; None entries are skipped.

  Groups are renumbered by first appearance of their group id. The result is a
  copy; with `copy=False` it shares the arrays of a single record.
  """
  present = [part for part in parts if part is not None]
  if isinstance(present[0], Responses):
    names = [name for part in present for name in part.parts]
    present = [part.replace(parts=named_parts(part, names)) for part in present]
  joined = present[0]
  if copy or len(present) > 1:
    joined = jax.tree.map(lambda *xs: np.concatenate(xs), *present)
  rollout = joined.rollout if isinstance(joined, Responses) else joined
  rollout = rollout.replace(group=group_index(rollout.group_id))
  if isinstance(joined, Responses):
    return joined.replace(rollout=rollout)
  return rollout


def named_parts(
  responses: Responses, names: Iterable[str]
) -> dict[str, np.ndarray]:
  """Returns named parts of the reward, float32 [B]; NaN where missing."""
  nothing = np.full(len(responses.rewards), np.nan, np.float32)
  return {name: responses.parts.get(name, nothing.copy()) for name in names}


def group_index(group_ids: chex.Array) -> np.ndarray:
  """Numbers group ids by first appearance; int32 [B]."""
  _, first, inverse = np.unique(
    group_ids, return_index=True, return_inverse=True
  )
  return np.argsort(np.argsort(first))[inverse].astype(np.int32)
