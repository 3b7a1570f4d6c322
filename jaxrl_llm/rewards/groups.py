"""Rewards that compare the responses to a prompt.

They replace verdicts in training only: what a group agrees on must not touch
the accuracy of an evaluation.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm import processes
from jaxrl_llm.rewards.judge import Judge, Judged
from jaxrl_llm.rewards.pool import CallPool, checked, compare
from jaxrl_llm.rewards.verdict import Grading, Verdict


class GroupReward:
  """Replaces the verdicts of each group by what a function makes of them."""

  def __init__(
    self,
    fn: Callable[[list[str], list[Verdict]], Sequence[Any]],
    judge: Judge,
    *,
    grading: Grading,
    **limits: float,
  ):
    """Starts the workers.

    Args:
      fn: (texts, verdicts) of a group -> a result for each, as of a reward.
      judge: turns verdicts into rewards.
      grading: conversion of numbers to verdicts.
      **limits: workers, deadline_s and batch_deadline_s, as in `CallPool`.

    Raises:
      InputError: The function cannot be sent to workers.
    """
    self._judge, self._grading = judge, grading
    self._calls = CallPool(functools.partial(compare, fn, grading), **limits)

  def __call__(self, judged: Judged) -> Judged:
    """Returns the responses with new verdicts.

    Responses without a verdict are left out, and stay without one. The part
    `true` keeps whether a response with a known answer is correct.
    """
    groups = collections.defaultdict(list)
    for row, verdict in enumerate(judged.verdicts):
      if verdict.error is None:
        groups[int(judged.responses.rollout.group_id[row])].append(row)
    jobs = [
      {
        "texts": [judged.texts[row] for row in rows],
        "verdicts": [dataclasses.astuple(judged.verdicts[row]) for row in rows],
      }
      for rows in groups.values()
    ]
    sizes = [len(rows) for rows in groups.values()]
    found = processes.of_first(self._calls, jobs, sizes) if jobs else []
    verdicts = list(judged.verdicts)
    for rows, (results, failed) in zip(groups.values(), found):
      for row, new in zip(
        rows, checked(results, failed, len(rows), self._grading)
      ):
        true = {"true": float(verdicts[row].correct)}
        known = judged.prompts[row].answer and not new.error
        parts = {**new.parts, **(true if known else {})}
        verdicts[row] = dataclasses.replace(new, parts=parts)
    return self._judge.judged(
      judged.responses.rollout, judged.prompts, judged.texts, verdicts
    )

  def close(self) -> None:
    """Ends the workers."""
    self._calls.close()
