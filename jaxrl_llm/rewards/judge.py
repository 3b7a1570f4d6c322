"""Decodes the responses of a rollout and judges them.

Separate from the verifiers, because their workers must not import JAX.
"""

import collections
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.verdict import Verdict
from jaxrl_llm.system import processes
from jaxrl_llm.types import Responses, Rollout, Status, join_rows

_STOPPED = Verdict(False, error="stopped")  # A response aborted by a schedule.


@dataclasses.dataclass(frozen=True)
class Judged:
  """Responses with their texts and verdicts, one entry per row."""

  responses: Responses
  prompts: Sequence[Prompt]
  texts: list[str]
  verdicts: list[Verdict]
  new_failures: Sequence[int] = ()  # Rows whose reward failed in a new way.


def join_judged(parts: Sequence[Judged]) -> Judged:
  """Concatenates judged responses; `new_failures` are dropped."""
  if len(parts) == 1:
    return parts[0]
  return Judged(
    join_rows([part.responses for part in parts]),
    [prompt for part in parts for prompt in part.prompts],
    [text for part in parts for text in part.texts],
    [verdict for part in parts for verdict in part.verdicts],
  )


class Judge:
  """Decodes responses, judges them and turns verdicts into rewards.

  Attributes:
    decode: tokens -> text.
    pool: computes the verdicts.
    tell: called with a message when the reward fails in a new way.
    failure: the latest such message.
  """

  def __init__(
    self,
    decode: Callable[[Sequence[int]], str],
    pool: RewardPool,
    *,
    name: str = "",
    correct: float = 1.0,
    incorrect: float = 0.0,
  ):
    """Takes arguments as in config group `reward`; decode is tokens -> text."""
    self.decode, self.pool, self._name = decode, pool, name
    self._by_correct = incorrect, correct
    self.tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
    self.failure = ""
    self._told: set[tuple] = set()

  def __call__(
    self,
    rollout: Rollout,
    prompts: Sequence[Prompt],
    conversations: Mapping[str, str] | None = None,
  ) -> Judged:
    """Judges every response against the answer to its prompt.

    Rewards see the opening and the text that the model generated; the model's
    turns of a conversation are joined by newlines, without the observations.

    Args:
      rollout: B responses.
      prompts: the prompt of each row.
      conversations: conversations as JSON, by sample id.
    """
    conversations = conversations or {}
    tokens = [x[:n] for x, n in zip(rollout.tokens, rollout.lengths)]
    texts = [self.decode(x) for x in tokens]
    calls = []
    for row, (prompt, status) in enumerate(zip(prompts, rollout.status)):
      talk = conversations.get(str(rollout.sample_id[row]), "{}")
      own = rollout.mask[row, : rollout.lengths[row]]
      own = own | (np.cumsum(own) == 0)  # Include the opening.
      text = texts[row] if own.all() else self._turns(tokens[row], own)
      finished = bool(status == Status.FINISHED)
      call = known(prompt, text, tokens=tokens[row][own], finished=finished)
      group = int(rollout.group_id[row])
      version = int(rollout.version[row].max(initial=0))
      talk = {"conversation": json.loads(talk), "policy_version": version}
      calls.append(call | talk | {"group": group})
    # Keep groups together: a batched reward may compare their responses.
    groups = collections.defaultdict(list)
    for row in np.flatnonzero(rollout.status != Status.STOPPED).tolist():
      groups[calls[row]["group"]].append(row)
    found = processes.in_shares(
      self._judge_groups, [[calls[i] for i in rows] for rows in groups.values()]
    )
    verdicts = [_STOPPED] * len(calls)
    for rows, new in zip(groups.values(), found):
      for row, verdict in zip(rows, new):
        verdicts[row] = verdict
    return self.judged(rollout, prompts, texts, verdicts)

  def _judge_groups(self, groups: Sequence[list]) -> list[list[Verdict]]:
    verdicts = iter(
      self.pool.judge([call for group in groups for call in group])
    )
    return [[next(verdicts) for _ in group] for group in groups]

  def judged(
    self,
    rollout: Rollout,
    prompts: Sequence[Prompt],
    texts: list[str],
    verdicts: list[Verdict],
  ) -> Judged:
    """Turns verdicts into rewards, and reports new kinds of failures."""
    responses = self._responses(rollout, verdicts)
    failures = self._new_failures(verdicts, prompts)
    return Judged(responses, prompts, texts, verdicts, failures)

  def _turns(self, tokens: np.ndarray, own: np.ndarray) -> str:
    """Decodes the model's turns, one per line."""
    cuts = np.flatnonzero(np.diff(own)) + 1
    turns = zip(np.split(tokens, cuts), np.split(own, cuts))
    return "\n".join(self.decode(x) for x, written in turns if written.all())

  def _responses(
    self, rollout: Rollout, verdicts: Sequence[Verdict]
  ) -> Responses:
    """Converts verdicts to arrays; missing parts are NaN."""
    rewards = [
      self._by_correct[v.correct] if v.value is None else v.value
      for v in verdicts
    ]
    parts = {}
    shown = [{**v.logged, **v.parts} for v in verdicts]
    for name in dict.fromkeys(name for own in shown for name in own):
      values = [own.get(name, np.nan) for own in shown]
      parts[name] = np.asarray(values, np.float32)
    return Responses(
      rollout=rollout,
      rewards=np.asarray(rewards, np.float32),
      correct=np.asarray([v.correct for v in verdicts], bool),
      judged=np.asarray([v.error is None for v in verdicts], bool),
      parts=parts,
    )

  def _new_failures(
    self, verdicts: Sequence[Verdict], prompts: Sequence[Prompt]
  ) -> list[int]:
    """Returns the rows whose reward failed in a new way, and reports each."""
    rows = []
    for row, (verdict, prompt) in enumerate(zip(verdicts, prompts)):
      if not verdict.error or verdict == _STOPPED:
        continue
      place = re.search(r"\(\S+:\d+\)\Z", verdict.error)
      kind = *verdict.error.split(": ")[:2], place and place[0]
      if kind not in self._told:
        self._told.add(kind)
        error = verdict.error.removeprefix("error: ")
        self.failure = f"reward {self._name}: {error} on {prompt.id}"
        self.tell(self.failure)
        rows.append(row)
    return rows

  def close(self) -> None:
    """Ends the workers."""
    self.pool.close()


def known(
  prompt: Prompt, response: str, *, tokens: Sequence[int], finished: bool
) -> dict[str, Any]:
  """Returns the inputs of a reward by name; see `arguments`."""
  answers = [prompt.answer, *prompt.alternatives]
  return {
    "id": prompt.id,
    "prompt": prompt.text,
    "question": prompt.question,
    "messages": prompt.messages,
    "response": response,
    "tokens": np.asarray(tokens).tolist(),
    "answer": answers if prompt.alternatives else prompt.answer,
    "finished": finished,
    "source": prompt.source,
    "columns": prompt.columns,
  }
