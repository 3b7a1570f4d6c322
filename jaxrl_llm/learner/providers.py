"""Providers of the inputs that no part of the algorithm computes.

Such an input is a field of the rollout or of its verdicts (`of_responses`), or
a model's score with an entry in `Algorithm.providers`.
"""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from jaxrl_llm import types
from jaxrl_llm.learner.algorithm import Algorithm, Provider
from jaxrl_llm.learner.packing import MiniBatch
from jaxrl_llm.learner.state import LearnerState
from jaxrl_llm.types import Origin, Responses, Rollout, take_rows

Scores = dict[str, np.ndarray]
# (name, rows of the data [B]) -> numbers [B].
Column = Callable[[str, np.ndarray], np.ndarray]
# Prefixes of inputs that are parts of the reward or columns of the data.
PREFIXES = PART, COLUMN = "part_", "column_"
VERDICTS = ("rewards", "correct", "judged")
# (scores of a language model) -> log-probs of the targets.
LOGPROBS = operator.attrgetter("logprobs")
# Inputs that every learner has.
OF_THE_BATCH = frozenset(
  {field.name for field in dataclasses.fields(Rollout)}
  | {*VERDICTS, "update_version"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring:
  """Scores a batch of B responses; the argument of providers.

  Attributes:
    learner: learner with its models and settings.
    state: state of the learner before the update.
    rollout: the responses.
    mini_batches: packed rows by member; some rows may be absent.
  """

  learner: Any  # A `Learner`, whose module imports this one.
  state: LearnerState
  rollout: Rollout
  mini_batches: Mapping[str, list[MiniBatch]]

  def packed(self, member: str, batch: MiniBatch, *given: Any) -> Any:
    """Scores a mini-batch, [M, r, C]; arguments as in `Learner.score`."""
    return self.learner.score(self.state, member, batch, *given)

  def zeros(self) -> np.ndarray:
    """Returns zero scores, [B, T]."""
    return np.zeros(self.rollout.mask.shape, np.float32)

  def tokens(
    self,
    member: str,
    read: Callable[[Any], np.ndarray] = lambda scored: scored,
    trained: Any = None,
    rows: np.ndarray | None = None,
    version: int = -1,
  ) -> np.ndarray:
    """Returns scores of a model at all tokens, [B, T]; 0 in absent rows.

    Args:
      member: name of the member, or of a frozen model, which scores the
        mini-batches of the policy.
      read: (the model's scores of a mini-batch) -> [M, r, C].
      trained, version: as in `Learner.score`.
      rows: bool [B]; mini-batches without any of these rows are not scored.
    """
    out = self.zeros()
    packed = member if member in self.mini_batches else "policy"
    for batch in self.mini_batches[packed]:
      if rows is None or rows[batch.rows].any():
        scored = self.packed(member, batch, trained, version)
        out[batch.rows] = batch.layout.gather(read(scored))
    return out

  @functools.cached_property
  def policy(self) -> Scores:
    """Log-probs and entropies of the policy before the update.

    `old_logprobs` [B, T], 0 where not scored, `entropies` if the algorithm
    reads them, and `scored`, bool [B]. If it reads neither, only the first
    mini-batch is scored, to compare sampler and trainer; nothing is scored if
    the policy sampled no token.
    """
    algorithm = self.learner.algorithm
    leaves = algorithm.leaves | algorithm.needs(algorithm.leaves)
    read = {"old_logprobs", "entropies"} & leaves
    out = {name: self.zeros() for name in sorted({"old_logprobs", *read})}
    out["scored"] = np.zeros(len(self.rollout.lengths), bool)
    batches = self.mini_batches["policy"]
    if not read:
      own = self.rollout.mask & (self.rollout.origin == Origin.POLICY)
      batches = batches[: int(own.any())]
    exact = self.learner.sampler_logprobs
    for batch in batches:
      out["scored"][batch.rows] = True
      if exact is None or "entropies" in out:
        scored, gather = self.packed("policy", batch), batch.layout.gather
        out["old_logprobs"][batch.rows] = gather(scored.logprobs)
        if "entropies" in out:
          out["entropies"][batch.rows] = gather(scored.entropy)
    if exact is not None:
      rows = out["scored"]
      found = exact(self.state.params("policy"), take_rows(self.rollout, rows))
      out["old_logprobs"][rows] = found
    return out

  def scores(self) -> Scores:
    """Returns the policy's scores and all others that the algorithm reads."""
    known, out = self.learner.algorithm.providers, dict(self.policy)
    leaves = sorted(self.learner.algorithm.leaves & known.keys())
    for give in dict.fromkeys(known[leaf].give for leaf in leaves):
      out |= give(self)
    return out


def _reference(scoring: Scoring) -> Scores:
  """Provides the log-probs of the initial policy."""
  reference = scoring.state.reference
  scored = scoring.tokens("policy", LOGPROBS, reference, version=0)
  return {"ref_logprobs": scored}


def _values(scoring: Scoring) -> Scores:
  """Provides the critic's scores before each token, and V after the last token.

  `valued`, bool [B], is True for the rows that were scored.
  """
  out = collections.defaultdict(scoring.zeros)
  rows = len(out["values"])
  after, valued = np.zeros(rows, np.float32), np.zeros(rows, bool)
  for batch in scoring.mini_batches["critic"]:
    scored = scoring.packed("critic", batch)
    for name, x in scored.items():
      out[name][batch.rows] = batch.layout.gather(x)
    after[batch.rows] = batch.layout.gather_last(scored["values"])
    valued[batch.rows] = True
  return {**out, "next_values": after, "valued": valued}


def of_member(member: str) -> Callable[[Scoring], np.ndarray]:
  """Returns a function for `provider` that computes a member's scores."""
  return lambda scoring: scoring.tokens(member)


_POLICY = Provider(("policy",), lambda scoring: scoring.policy)
_CRITIC = Provider(("critic",), _values)
# Inputs that every algorithm may read, by name.
PROVIDERS = {
  "old_logprobs": _POLICY,
  "entropies": _POLICY,
  "ref_logprobs": Provider(("policy", "reference"), _reference),
  "values": _CRITIC,
  "next_values": _CRITIC,
}


def provider(
  name: str, fn: Callable[[Scoring], np.ndarray], *needs: str
) -> dict[str, Provider]:
  """Returns an entry of `Algorithm.providers`.

  Args:
    name: name of the input.
    fn: (scoring of a batch) -> host array [B, T] or [B].
    *needs: names that `fn` reads: models of the learner, or inputs.
  """
  return {name: Provider(needs, lambda scoring: {name: fn(scoring)})}


def gives(algorithm: Algorithm, leaf: str) -> bool:
  """Returns whether an input has a provider."""
  named = leaf.startswith(PREFIXES)
  return named or leaf in OF_THE_BATCH or leaf in algorithm.providers


def of_responses(
  responses: Responses, version: int, names: Collection[str], column: Column
) -> Scores:
  """Returns the inputs among `names` that are fields of the responses.

  Args:
    responses: B judged responses.
    version: version of the policy before the update.
    names: names of inputs; a missing part of the reward [B] is 0.
    column: reads the data.
  """
  given = {**responses.rollout, "update_version": np.int32(version)}
  given |= {name: responses[name] for name in VERDICTS}
  for name in names:
    if name.startswith(PART):
      part = name.removeprefix(PART)
      given[name] = np.nan_to_num(types.named_parts(responses, [part])[part])
    if name.startswith(COLUMN):
      ids = responses.rollout.example_id
      given[name] = column(name.removeprefix(COLUMN), ids)
  return {name: given[name] for name in names if name in given}
