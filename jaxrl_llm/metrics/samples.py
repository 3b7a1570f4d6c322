"""Responses formatted for logs and display."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.rewards.judge import Judged
from jaxrl_llm.types import Status

# Number of characters shown from the end of a text.
_PROMPT_TAIL = 120
_RESPONSE_TAIL = 240


class Sample(NamedTuple):
  """One response."""

  prompt: str
  response: str
  gold: str
  extracted: str | None  # None: no answer was found in the response.
  reward: float  # NaN without a verdict.
  length: int  # Response tokens.
  stop: str  # Why generation stopped, such as 'finished' or 'overlong'.
  error: str | None = None  # Why the reward failed.
  correct: bool | None = None  # None without a verdict.
  parts: Mapping[str, float] = {}  # Parts of the reward.
  example: str = ""  # Id of the example.
  group: int | None = None  # Group id, unique per draw of the prompt.
  sample: int | None = None  # Sample id, unique in the run.
  per_token: Mapping[str, list] = {}  # Additional fields of the row.

  def row(self, step: int) -> dict[str, Any]:
    """Returns the row of samples.jsonl; a non-finite reward is None."""
    row = {"step": step} | self._asdict() | {"reward": _finite(self.reward)}
    return row | row.pop("per_token")


def _finite(number: float) -> float | None:
  return number if math.isfinite(number) else None


def make_samples(judged: Judged, rows: Sequence[int]) -> list[Sample]:
  """Makes samples of the given rows."""
  responses, rollout = judged.responses, judged.responses.rollout
  has_verdict = responses.ended & responses.judged
  return [
    Sample(
      prompt=judged.prompts[i].text,
      response=judged.texts[i],
      gold=judged.prompts[i].answer,
      extracted=judged.verdicts[i].extracted,
      reward=float(responses.rewards[i]) if has_verdict[i] else math.nan,
      length=int(rollout.lengths[i]),
      stop=Status(int(rollout.status[i])).name.lower(),
      error=judged.verdicts[i].error,
      correct=bool(responses.correct[i]) if has_verdict[i] else None,
      parts={k: _finite(float(x[i])) for k, x in responses.parts.items()},
      example=judged.prompts[i].id,
      group=int(rollout.group_id[i]),
      sample=int(rollout.sample_id[i]),
    )
    for i in rows
  ]


def sample_lines(samples: Sequence[Sample]) -> Iterator[str]:
  """Yields three lines per sample; pass them through `printable`."""
  for sample in samples:
    found = sample.extracted
    if found is None:
      found = sample.error or "(none)"
    known = _finite(sample.reward) is not None
    yield (
      f"reward {f'{sample.reward:.2f}' if known else '(none)'}  length"
      f" {sample.length}  stop {sample.stop}  gold {sample.gold}  extracted"
      f" {found}"
    )
    yield f"  prompt: {_tail(sample.prompt, _PROMPT_TAIL)}"
    yield f"  response: {_tail(sample.response, _RESPONSE_TAIL)}"


def _tail(text: str, length: int) -> str:
  return text if len(text) <= length else "..." + text[-length:]
