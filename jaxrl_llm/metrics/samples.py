"""Judged responses for display."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.rewards.judge import Judged
from jaxrl_llm.types import Status

# Characters of their ends that are shown.
_PROMPT_TAIL = 120
_RESPONSE_TAIL = 240


class Sample(NamedTuple):
  """One judged response."""

  prompt: str
  response: str
  gold: str
  extracted: str | None  # None: no answer was found in the response.
  reward: float
  length: int  # Response tokens.
  stop: str  # Why it ended, e.g. 'finished' or 'overlong'.
  error: str | None = None  # Why the reward failed.

  def row(self, step: int) -> dict[str, Any]:
    """Returns its row of samples.jsonl; non-finite rewards are None."""
    reward = self.reward if math.isfinite(self.reward) else None
    return {"step": step} | self._asdict() | {"reward": reward}


def make_samples(judged: Judged, rows: Sequence[int]) -> list[Sample]:
  """Returns the samples of the given rows."""
  rollout, rewards = judged.responses.rollout, judged.responses.rewards
  return [
    Sample(
      prompt=judged.prompts[i].text,
      response=judged.texts[i],
      gold=judged.prompts[i].answer,
      extracted=judged.verdicts[i].extracted,
      reward=float(rewards[i]),
      length=int(rollout.lengths[i]),
      stop=Status(int(rollout.status[i])).name.lower(),
      error=judged.verdicts[i].error,
    )
    for i in rows
  ]


def sample_lines(samples: Sequence[Sample]) -> Iterator[str]:
  """Returns three lines per sample; pass them through `printable`."""
  for sample in samples:
    found = sample.extracted
    if found is None:
      found = sample.error or "(none)"
    yield (
      f"reward {sample.reward:.2f}  length {sample.length}  stop {sample.stop}"
      f"  gold {sample.gold}  extracted {found}"
    )
    yield f"  prompt: {_tail(sample.prompt, _PROMPT_TAIL)}"
    yield f"  response: {_tail(sample.response, _RESPONSE_TAIL)}"


def _tail(text: str, length: int) -> str:
  return text if len(text) <= length else "..." + text[-length:]
