"""Rewards that compare the responses to a prompt.

They replace verdicts in training only: what a group agrees on must not touch
the accuracy of an evaluation.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.rewards.adapters import Comparison
from jaxrl_llm.rewards.judge import Judge, Judged
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.verdict import Verdict
from jaxrl_llm.system import processes


class GroupReward:
  """Replaces the verdicts of each group by what a function makes of them."""

  def __init__(
    self,
    fn: Callable[[list[str], list[Verdict]], Sequence[Any]],
    judge: Judge,
    **settings: Any,
  ):
    """Starts the workers.

    Args:
      fn: (texts, verdicts) of a group -> a result for each, as of a reward.
      judge: turns verdicts into rewards.
      **settings: workers, grading and time limits, as of a `RewardPool`.

    Raises:
      InputError: The function cannot be sent to workers.
    """
    self._judge = judge
    self._pool = RewardPool(Comparison(fn), **settings)

  def __call__(self, judged: Judged) -> Judged:
    """Returns the responses with new verdicts.

    Responses without a verdict are left out, and stay without one. The part
    `true` keeps whether a response with a known answer is correct.
    """
    rollout, verdicts = judged.responses.rollout, list(judged.verdicts)
    rows = [row for row, old in enumerate(verdicts) if old.error is None]
    calls = [
      {
        "texts": judged.texts[row],
        "verdicts": dataclasses.astuple(verdicts[row]),
        "group": int(rollout.group_id[row]),
        "columns": {},
      }
      for row in rows
    ]
    for row, new in zip(rows, processes.of_first(self._pool.judge, calls)):
      parts = dict(new.parts)
      if judged.prompts[row].answer and not new.error:
        parts["true"] = float(verdicts[row].correct)
      verdicts[row] = dataclasses.replace(new, parts=parts)
    return self._judge.judged(rollout, judged.prompts, judged.texts, verdicts)

  def close(self) -> None:
    """Ends the workers."""
    self._pool.close()
