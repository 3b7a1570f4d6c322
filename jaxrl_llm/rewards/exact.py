"""Rewards that compare text exactly."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards.verdict import Verdict

_FINAL = re.compile(r"#([0-9]{1,9})\.\Z")


def chain_sum(response: str, answer: str, *, finished: bool) -> Verdict:
  """Checks that a finished response ends with `#N.`, where N is the answer."""
  match = _FINAL.search(response[-11:])
  extracted = match[1] if match else None
  return Verdict(finished and extracted == answer, extracted)


def exact_line(response: str, answer: str, *, finished: bool) -> Verdict:
  """Checks that the response's first line, stripped, is the answer.

  With few-shot prompts, the model continues with further examples after its
  line instead of a stop token. A line that was cut off is not an answer.
  """
  line, newline, _ = response.partition("\n")
  extracted = line.strip()[:512]
  whole = finished or bool(newline)
  return Verdict(whole and extracted == answer.strip(), extracted or None)


def environment(conversation: Mapping[str, Any]) -> dict[str, float]:
  """Returns the environment's rewards by part; 0 if there are none."""
  return dict(conversation["rewards"]) or {"given": 0.0}
