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

Other runs are not trusted: what cannot be used is skipped and counted. A run is
identified by the id in the names of its files, and a file by its name and first
line, as folders are reused, moved and deleted.

Reference: Amico et al. 2025 (SAPO, swarm sampling policy optimization),
arXiv:2509.08721. Differs in that complete groups are shared, and stored.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import stat
import sys
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import config, digest
from jaxrl_llm.data import rows
from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.learner import Algorithm, Settings
from jaxrl_llm.rewards.judge import Judged
from jaxrl_llm.system import files, processes
from jaxrl_llm.types import Origin, Responses, Rollout, Status

_FIRST_SAMPLE = 1 << 30  # Above every sample id of the run itself.
_ENDS = {x.name.lower(): x for x in (Status.FINISHED, Status.OVERLONG)}
_MOST_BYTES = 1 << 28  # Read by a batch; the rest is left for the next ones.
_MOST_RESPONSES = 1024  # To a question in a batch.
_LEAST_LOGPROB = float(np.finfo(np.float32).min)


class Swarm:
  """Exchanges responses through files in the format of `generate.py`.

  Attributes:
    run: identifies the run; the loop sets the id of its directory.
  """

  def __init__(self, share_in: str, replay_from: Sequence[str]):
    """Takes the own folder, and the files and folders of other policies."""
    self.run = uuid.uuid4().hex
    self._own = pathlib.Path(share_in)
    self._others = [pathlib.Path(path) for path in replay_from]
    self._rows: dict[str, int] = {}  # Rows of the data by question.
    self._read: dict[str, int] | None = None  # Bytes read of each file.
    self._seen: dict[pathlib.Path, tuple] = {}  # Files that were read, as then.
    self._skipped, self._told = 0, set()
    self._tell = lambda line: print(line, file=sys.stderr)

  def read(
    self, number: int, store: Responses | None, source: Any, writer: Any
  ) -> tuple[Rollout | None, list, int]:
    """Reads new responses of other policies.

    Args:
      number: number of the batch; a repeated batch reads the same responses.
      store: the replay store, whose ids are not reused.
      source: the `PromptSource` of the run.
      writer: the `ResponseWriter` of the run.

    Returns:
      The responses or None, the prompt of each, and the number of lines and
      files that were skipped.

    Raises:
      InputError: The own folder cannot be made.
    """
    self._tell = writer.judge.tell
    lines, self._skipped = processes.of_first(self._lines, number)
    found: dict[int, list[dict]] = {}
    for where, record in lines:
      try:
        row = self._checked(record, source, writer)
        if len(found.setdefault(row, [])) == _MOST_RESPONSES:
          raise InputError("too many responses to a question")
        found[row].append(record)
      except InputError as error:
        self._skip(where, str(error))
    taken = {} if store is None else store.rollout
    ids = itertools.count(min([0, *taken.get("group_id", ())]) - 1, -1)
    asked = [(source.prompt(row, next(ids)), x) for row, x in found.items()]
    asked = [(prompt, x) for prompt, x in asked if prompt is not None and x]
    if not asked:
      return None, [], self._skipped
    ids = itertools.count(max([_FIRST_SAMPLE, *taken.get("sample_id", ())]) + 1)
    numbers = [[next(ids) for _ in group] for _, group in asked]
    begun = writer.begin([prompt for prompt, _ in asked], numbers)
    for row, record in enumerate(itertools.chain(*(x for _, x in asked))):
      _fill(begun, row, record)
    prompts = [prompt for prompt, group in asked for _ in group]
    return begun, prompts, self._skipped

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
      self._write(f"{self.run}-{number:012d}.jsonl", "".join(lines))

  def _write(self, name: str, text: str) -> bool:
    """Writes a file of the own folder; returns whether it could."""
    try:
      self._own.mkdir(parents=True, exist_ok=True)
      files.write_whole(self._own / name, text)
    except OSError as error:  # Such as a full disk, or a folder that was moved.
      self._skip(self._own / name, f"cannot be written ({error.strerror})")
      return False
    return True

  def _skip(self, where: str | pathlib.Path, why: str) -> None:
    """Counts something that is skipped; tells about the first of its kind."""
    self._skipped += 1
    if why not in self._told:
      self._told.add(why)
      self._tell(f"config.method.sapo.share_in: skipped {where}: {why}")

  def _checked(self, record: dict, source: Any, writer: Any) -> int:
    """Returns the row of the data that a response is to.

    Raises:
      InputError: The response cannot be used.
    """
    example = rows.to_example(rows.Row("it", record), solved=False)
    tokens, logprobs = record.get("tokens"), record.get("logprobs")
    if not (isinstance(tokens, list) and isinstance(logprobs, list)):
      raise InputError("it has no tokens and log-probs")
    most = writer.engine.config.max_response_length
    if not 0 < len(tokens) == len(logprobs) <= most:
      raise InputError(
        "it needs 1 to sampler.max_response_length tokens, with a log-prob each"
      )
    if not all(type(x) is int and 0 <= x < source.vocab_size for x in tokens):
      raise InputError("it has a token that is not of this run's tokenizer")
    if not all(
      type(x) in (int, float) and _LEAST_LOGPROB <= x <= 0 for x in logprobs
    ):
      raise InputError("it has a log-prob that is no number of at most 0")
    if str(record.get("stop_reason")) not in _ENDS or "turns" in record:
      raise InputError("it has not ended, or has turns")
    if writer.judge.decode(tokens) != record.get("text"):
      raise InputError("its text is not that of its tokens for this tokenizer")
    if not self._rows:
      every = range(len(source))
      self._rows = {source.example(i, 0).question: i for i in every}
    if example.question not in self._rows:
      raise InputError("its question is not in the training data")
    return self._rows[example.question]

  def _lines(self, number: int) -> tuple[list, int]:
    """Returns the new lines of a batch and records them.

    Returns:
      [location, record] of each, and the number of skipped lines and files.
    """
    self._skipped, names = 0, f"{self.run}-*.read"
    journal = self._own / names.replace("*", f"{number:012d}")
    if self._read is None:
      what = f"config.method.sapo.share_in={self._own}: cannot be made"
      with as_input_error(what, "choose another folder", OSError):
        self._own.mkdir(parents=True, exist_ok=True)
      self._read = {}
      for file in sorted(self._own.glob(names)):  # Also of later batches.
        with contextlib.suppress(OSError, ValueError), file.open() as lines:
          self._read |= json.loads(lines.readline())["read"]
    if journal.exists():
      try:
        with journal.open() as lines:
          first, *records = map(json.loads, lines)
        return records, first["skipped"]
      except (OSError, ValueError) as error:
        self._skip(journal, f"cannot be read ({error})")
        return [], self._skipped
    before, self._read, records = self._read, {**self._read}, []
    left = _MOST_BYTES
    for file in sorted({*self._files()}):
      try:
        about = file.stat()
        if not stat.S_ISREG(about.st_mode):  # It may not end.
          raise OSError("no regular file")
        state = about.st_ino, about.st_size, about.st_mtime_ns
        if left > 0 and self._seen.get(file) != state:
          left -= self._take(file, left, records)
          if left > 0:
            self._seen[file] = state
      except OSError as error:
        if str(file) not in self._read:
          self._read[str(file)] = 0
          self._skip(file, error.strerror or str(error))
    new = dict(self._read.items() - before.items())
    text = [{"read": new, "skipped": self._skipped}, *records]
    text = "".join(json.dumps(line) + "\n" for line in text)
    if not self._write(journal.name, text):
      self._read, self._seen, records = before, {}, []  # For a later batch.
    return records, self._skipped

  def _files(self) -> Iterator[pathlib.Path]:
    """Yields the files of other runs."""
    for place in self._others:
      with contextlib.suppress(OSError):
        for file in place.glob("*.jsonl") if place.is_dir() else [place]:
          if os.path.lexists(file) and not file.name.startswith(self.run):
            yield file

  def _take(self, file: pathlib.Path, most: int, records: list) -> int:
    """Appends [location, record] of each new line; returns the bytes read.

    Bad lines are skipped, and the last one is left if it is incomplete.
    """
    # Does not wait for a writer of a pipe that has just replaced the file.
    with open(os.open(file, os.O_NONBLOCK), "rb") as content:
      name = f"{file.name}:{digest.of_bytes(content.readline(2**16).strip())}"
      begin = place = content.seek(self._read.get(name, 0))
      while place < begin + most and (line := content.readline(_MOST_BYTES)):
        where = f"{file}, byte {place}"
        try:
          if line.strip():
            text = line.decode(errors="replace")
            records.append([where, rows.parse_object(text, "it")])
        except InputError as error:
          if len(line) == _MOST_BYTES:
            self._skip(file, "has a line that is too long")
            self._read[name] = content.seek(0, os.SEEK_END)
            break
          if not line.endswith(b"\n"):
            break
          self._skip(where, str(error).partition(" (")[0])
        place += len(line)
        self._read[name] = place
    return place - begin


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


def _fill(rollout: Rollout, row: int, record: dict) -> None:
  """Writes a response into a new row of a rollout."""
  tokens, logprobs = record["tokens"], record["logprobs"]
  new = np.s_[row, : len(tokens)]
  rollout.tokens[new], rollout.behavior_logprobs[new] = tokens, logprobs
  rollout.mask[new], rollout.origin[new] = True, int(Origin.OTHER)
  rollout.lengths[row] = len(tokens)
  rollout.status[row] = int(_ENDS[record["stop_reason"]])


def sapo(
  algorithm: Algorithm,
  s: Settings,
  *,
  share_in: config.NewPath = "",
  replay_from: Sequence[config.NewPath] = (),
) -> Algorithm:
  """Exchanges responses with other runs through the replay store.

  Args:
    algorithm: any algorithm.
    s: settings of the run.
    share_in: Folder to which only this run writes: its judged responses, and
      records of the lines of other policies' files that it has read. ''
      neither shares nor reads.
    replay_from: Sources of other policies' responses: JSON lines files as
      generate.py writes them, or the folders of other runs' share_in.
  """
  if replay_from and not share_in:
    raise InputError(
      "method.sapo.share_in records which shared groups a batch has used; set"
      " it to a folder"
    )
  if not share_in:
    return algorithm
  if not s.schedule.replay:
    raise InputError(
      "shared responses are in the replay store; set schedule.replay above 0"
    )
  if s.environment.name:
    raise InputError(
      "shared responses have no turns; leave environment.name or"
      " method.sapo.share_in empty"
    )
  feed = functools.partial(Swarm, share_in, tuple(replay_from))
  return algorithm.change(feed=feed)
