"""DART: an unsolved prompt gets a correct response from an earlier step.

The store holds the newest correct response to each prompt. If all responses to
a prompt in a step are wrong, the stored response joins the prompt's first
group, which then has a gradient, unlike in GRPO. Its log-probs are those of the
policy that sampled it, so that `off_policy.correction` can weight it. Differs
from the replay of groups in that a step samples as many responses as without
replay.

Reference: Li et al. 2025 (DART), arXiv:2509.23866. Differs in that the run
collects the responses itself and adds one instead of replacing one.
"""

import numpy as np

from jaxrl_llm.data import replay
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Algorithm, Settings
from jaxrl_llm.types import Responses, ended, join_rows, take_rows


class Successes(replay.Replay):
  """Stores correct responses for prompts that a step does not solve."""

  def draw(self, store: Responses | None, step: int) -> None:
    """Draws no groups, so that all groups of a batch are new."""

  def add(
    self, store: Responses | None, responses: Responses
  ) -> Responses | None:
    """Returns the store with the correct responses of a batch.

    It has the newest response to each prompt, for at most `capacity` prompts.
    """
    right = responses.correct & responses.judged & ended(responses.rollout)
    if not right.any():
      return store
    joined = join_rows([store, take_rows(responses, right)])
    newest_first = joined.rollout.example_id[::-1]
    _, last = np.unique(newest_first, return_index=True)
    rows = len(newest_first) - 1 - np.sort(last)[: self.capacity]
    return take_rows(joined, rows[::-1])

  def complete(
    self, store: Responses | None, batch: Responses
  ) -> Responses | None:
    """Returns a stored response to each prompt that a batch did not solve.

    The responses get the group ids of the batch; at most `groups` are returned.
    """
    if store is None:
      return None
    rollout, judged = batch.rollout, batch.judged
    # A prompt may have several groups.
    examples, first, of = np.unique(
      rollout.example_id, return_index=True, return_inverse=True
    )
    right = np.bincount(of, batch.correct & judged)
    wrong = np.bincount(of, ~batch.correct & judged)
    unsolved = (right == 0) & (wrong > 0)
    _, which, rows = np.intersect1d(
      examples[unsolved], store.rollout.example_id, return_indices=True
    )
    if not rows.size:
      return None
    which, rows = which[: self.groups], rows[: self.groups]
    added = take_rows(store, rows)
    group_id = rollout.group_id[first[unsolved][which]]
    ids = {"group_id": group_id, "sample_id": -1 - added.rollout.sample_id}
    return added.replace(rollout=added.rollout.replace(**ids))


def dart(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Adds a stored correct response to the groups of unsolved prompts."""
  if not s.schedule.replay:
    raise InputError("there is no store; set schedule.replay above 0")
  if s.schedule.dynamic_sampling:
    raise InputError(
      "dynamic sampling drops unsolved groups; use"
      " schedule.dynamic_sampling=False"
    )
  if "mc_grpo" in s.method.use:
    raise InputError(
      "a group with a stored response has no median; choose 'dart' or 'mc_grpo'"
    )
  return algorithm.change(replay=Successes)
