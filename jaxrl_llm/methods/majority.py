"""Majority labels: training without reference answers.

The most frequent answer of a group is its label (the first one in a tie);
responses with another answer or none are wrong. Differs from a verifier in that
the data need no answers, and in that a wrong majority reinforces its error.

Reference: Zuo et al. 2025 (TTRL), arXiv:2504.16084.
"""

import collections
from collections.abc import Sequence

from jaxrl_llm import rewards
from jaxrl_llm.learner import Algorithm, Settings


def has_majority(
  texts: Sequence[str], verdicts: Sequence[rewards.Verdict]
) -> list[bool]:
  """Returns whether each response of a group has the majority's answer."""
  answers = [verdict.extracted for verdict in verdicts]
  votes = collections.Counter(x for x in answers if x is not None)
  label = max(votes, key=votes.get, default=None)
  return [answer is not None and answer == label for answer in answers]


def majority(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Rewards the most frequent answer of a group."""
  return algorithm.change(group_reward=has_majority)
