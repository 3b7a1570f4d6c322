"""SAPO: runs also train on the responses of other runs.

A run writes the judged responses of every batch to a folder that other runs
read. Responses of other policies, including those from `generate.py`, enter the
replay store with the log-probs that they were sampled with, so that the weights

    w_t = π_old(a_t) / π_other(a_t)

of `off_policy.correction` are exact within their bounds. Every run judges them
itself, and finds the prompt of a response by its question. A line is read once,
by the first batch after it appears: files may grow. The run records the lines
of a batch in its own folder, so that it reads the same ones again if it is
killed and resumed.

Reference: Amico et al. 2025 (SAPO, swarm sampling policy optimization),
arXiv:2509.08721. Differs in that complete groups are shared, and stored.
"""

import contextlib
import itertools
import json
import pathlib
from typing import Any

import numpy as np

from jaxrl_llm.data import replay, rows
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.judge import Judged
from jaxrl_llm.system import files, processes
from jaxrl_llm.types import Origin, Responses, Rollout, Status

_FIRST_SAMPLE = 1 << 30  # Above every sample id of the run itself.
_ENDS = {x.name.lower(): x for x in (Status.FINISHED, Status.OVERLONG)}


class Swarm:
  """Exchanges responses through files in the format of `generate.py`."""

  def __init__(self, schedule: Any):
    """Reads the folders from the config group `schedule`."""
    self._own = pathlib.Path(schedule["share_in"])
    self._others = [pathlib.Path(path) for path in schedule["replay_from"]]
    self._rows: dict[str, int] = {}  # Rows of the data by question.
    self._read: dict[str, int] | None = None  # Lines read of each file.

  def read(
    self, number: int, store: Responses | None, source: Any, writer: Any
  ) -> tuple[Rollout, list] | None:
    """Returns new responses of other policies and their prompts, or None.

    Args:
      number: number of the batch; a repeated batch reads the same responses.
      store: the replay store, whose ids are not reused.
      source: the `PromptSource` of the run.
      writer: the `ResponseWriter` of the run.

    Raises:
      InputError: A file cannot be used.
    """
    lines, found = processes.of_first(self._lines, number), {}
    for line in lines:
      question = rows.to_example(rows.Row(*line), solved=False).question
      if line[1].get("stop_reason") in _ENDS:
        found.setdefault(self._row(question, source), []).append(line)
    found.pop(None, None)  # Questions that this run does not train on.
    taken = {} if store is None else store.rollout
    ids = itertools.count(min([0, *taken.get("group_id", ())]) - 1, -1)
    asked = [(source.prompt(row, next(ids)), x) for row, x in found.items()]
    asked = [(prompt, x) for prompt, x in asked if prompt is not None]
    if lines and not asked and store is None:
      raise InputError(
        f"{lines[0][0]}: the file has no complete response to a question of"
        " the training data; generate responses to these questions"
      )
    ids = itertools.count(max([_FIRST_SAMPLE, *taken.get("sample_id", ())]) + 1)
    numbers = [[next(ids) for _ in group] for _, group in asked]
    begun = writer.begin([prompt for prompt, _ in asked], numbers)
    for row, line in enumerate(itertools.chain(*(x for _, x in asked))):
      _fill(begun, row, *line, writer.judge.decode)
    prompts = [prompt for prompt, group in asked for _ in group]
    return (begun, prompts) if prompts else None

  def write(self, number: int, judged: list[Judged]) -> None:
    """Shares the ended responses of a batch that have a verdict."""
    lines = []
    for each in judged if processes.is_first() else ():
      rollout = each.responses.rollout
      shared = each.responses.ended & each.responses.judged
      shared &= rollout.mask.sum(axis=1) == rollout.lengths  # All sampled.
      records = [_record(each, row) for row in np.flatnonzero(shared).tolist()]
      lines += [json.dumps(record) + "\n" for record in records]
    if lines:
      files.write_whole(self._own / f"{number:012d}.jsonl", "".join(lines))

  def _row(self, question: str, source: Any) -> int | None:
    """Returns the row of the data with a question; None if there is none."""
    if not self._rows:
      every = range(len(source))
      self._rows = {source.example(i, 0).question: i for i in every}
    return self._rows.get(question)

  def _lines(self, number: int) -> list[rows.Row]:
    """Reads the new lines of a batch, and records which these are."""
    journal = self._own / f"{number:012d}.read"
    if self._read is None:  # Records of later batches are added below.
      self._own.mkdir(parents=True, exist_ok=True)
      self._read = {}
      for file in sorted(self._own.glob("*.read")):
        self._read |= {name: end for name, (_, end) in _parts(file).items()}
    if journal.exists():
      parts = _parts(journal)
    else:
      found = [[p] if p.is_file() else p.glob("*.jsonl") for p in self._others]
      parts = {}
      for file in sorted(set(itertools.chain(*found))):
        begin, end = self._read.get(str(file), 0), _end(file)
        if begin < end:
          parts[str(file)] = begin, end
          self._read[str(file)] = end
      files.write_whole(journal, json.dumps(parts))
    found = []
    for name, (begin, end) in parts.items():
      lines = pathlib.Path(name).read_bytes().split(b"\n")[:end]
      # Blank lines keep the numbers of the others, for messages.
      lines[:begin] = [b""] * begin
      found += rows.parse_rows(b"\n".join(lines), name)
    return found


def _parts(journal: pathlib.Path) -> dict[str, tuple[int, int]]:
  """Returns the lines that a batch has read, (begin, end) by file."""
  parts = json.loads(journal.read_text())
  # Earlier versions recorded the names of entire files.
  return parts if isinstance(parts, dict) else {x: (0, _end(x)) for x in parts}


def _end(file: str | pathlib.Path) -> int:
  """Returns the number of complete lines of a file, which may be growing."""
  lines = pathlib.Path(file).read_bytes().split(b"\n")
  with contextlib.suppress(ValueError):
    json.loads(lines[-1])  # Complete, though without a newline.
    return len(lines)
  return len(lines) - 1


def _record(judged: Judged, row: int) -> dict[str, Any]:
  """Returns a response as a record in the format of `generate.py`."""
  rollout = judged.responses.rollout
  own = np.s_[row, : rollout.lengths[row]]
  return {
    "question": judged.prompts[row].question,
    "text": judged.texts[row],
    "tokens": rollout.tokens[own].tolist(),
    "logprobs": rollout.behavior_logprobs[own].tolist(),
    "stop_reason": Status(int(rollout.status[row])).name.lower(),
  }


def _fill(
  rollout: Rollout, row: int, where: str, record: dict, decode: Any
) -> None:
  """Writes a response into a new row of a rollout.

  Raises:
    InputError: The record is incomplete, or does not fit.
  """
  tokens, logprobs = (record.get(x) or [] for x in ("tokens", "logprobs"))
  fits = 0 < len(tokens) == len(logprobs) <= rollout.tokens.shape[1]
  if not fits or "turns" in record or decode(tokens) != record.get("text"):
    raise InputError(
      f"{where}: has {len(tokens)} tokens and {len(logprobs)} log-probs; a"
      " response needs 1 to sampler.max_response_length tokens of this run's"
      " tokenizer, a log-prob for each of them, and no turns"
    )
  new = np.s_[row, : len(tokens)]
  rollout.tokens[new], rollout.behavior_logprobs[new] = tokens, logprobs
  rollout.mask[new], rollout.origin[new] = True, int(Origin.OTHER)
  rollout.lengths[row] = len(tokens)
  rollout.status[row] = int(_ENDS[record["stop_reason"]])


replay.FEEDS["share_in"] = Swarm
