"""Group rewards, which compare the responses to a prompt.

They replace verdicts only in training, so that pseudo-labels never affect
evaluation accuracy.
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
  """Replaces the verdicts of each group with the results of a function."""

  def __init__(
    self,
    fn: Callable[[list[str], list[Verdict]], Sequence[Any]],
    judge: Judge,
    **settings: Any,
  ):
    """Starts the workers.

    Args:
      fn: (texts, verdicts) of a group -> results, one per response, of any type
        that a reward may return.
      judge: turns verdicts into rewards.
      **settings: workers, grading and time limits, as in `RewardPool`.

    Raises:
      InputError: The function cannot be sent to workers.
    """
    self._judge = judge
    self._pool = RewardPool(Comparison(fn), **settings)

  def __call__(self, judged: Judged) -> Judged:
    """Returns the responses with new verdicts.

    Responses without a verdict are not passed to the function and keep none.
    A response with a known answer gets the parts `true`, whether it is correct,
    and `agrees`, whether the new verdict agrees with that.
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
        true = verdicts[row].correct
        parts |= {"true": float(true), "agrees": float(new.correct == true)}
      verdicts[row] = dataclasses.replace(new, parts=parts)
    new = self._judge.judged(rollout, judged.prompts, judged.texts, verdicts)
    failures = [*judged.new_failures, *new.new_failures]
    return dataclasses.replace(new, new_failures=failures)

  def close(self) -> None:
    """Ends the workers."""
    self._pool.close()
