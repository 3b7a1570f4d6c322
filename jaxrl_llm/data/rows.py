"""Reads rows of data and converts them to examples.

A row has a question, as text or as a conversation. The columns of this library
(`question`, `answer`), of verl (`prompt`, `data_source`, `reward_model`) and of
TRL (`prompt`, `solution` or `ground_truth`, any) are recognized by name; a
mapping names other columns. All columns stay with the example, for rewards.
"""

import collections
import contextlib
import decimal
import functools
import glob
import json
import os
import pathlib
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data.tasks import Example
from jaxrl_llm.errors import InputError, as_input_error

# Keys of data.columns -> default columns; the first one present is used.
COLUMNS = {
  "question": ("prompt", "messages", "question", "problem"),
  "answer": (
    *("reward_model.ground_truth", "answer", "final_answer"),
    *("ground_truth", "solution"),
  ),
  "completion": ("completion", "solution"),
  "id": ("id",),
  "source": ("data_source", "source"),
}
# Advice for a path without a file extension.
_HUB = (
  "check the path. For a dataset of the Hub: `hf download {}"
  " --repo-type=dataset --local-dir DIR` and data.source=parquet with"
  " data.path='DIR/*/train*.parquet', or JSON lines by to_json('FILE.jsonl') of"
  " `datasets`"
)


# First bytes of files of gzip, zip, bzip2, xz and zstd.
_COMPRESSED = b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd"
_MOST_ERRORS = 5  # Bad rows that one message describes.


class Row(NamedTuple):
  """A row of data as read."""

  where: str  # Its file and line, for messages.
  fields: dict[str, Any]


def read_examples(
  path: str, columns: Mapping[str, str] | None = None
) -> list[Example]:
  """Reads the examples of JSONL and Parquet files, in order.

  Args:
    path: a file, several separated by commas, or glob patterns.
    columns: see `to_example`.

  Raises:
    InputError: See `read_rows` and `to_example`.
  """
  examples, paths = [], files(path)
  for file in paths:
    if paths.count(file) > 1:
      raise InputError(f"{file} is named twice; name every file once")
  for file, stem in zip(paths, told_apart([x.stem for x in paths], paths)):
    convert = functools.partial(to_example, columns=columns, source=stem)
    examples += _convert(convert, read_rows(file))
  return examples


def _convert(convert: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
  """Converts all items; raises the first errors, up to five, as one."""
  results, errors = [], []
  for item in items:
    try:
      results.append(convert(item))
    except InputError as error:
      errors.append(str(error))
    if len(errors) == _MOST_ERRORS:
      break
  if errors:
    # A folder is given once: the middle of long messages is left out.
    folder = os.path.commonprefix(errors).rpartition("/")[0] + "/"
    others = [error.removeprefix(folder) for error in errors[1:]]
    raise InputError("; ".join([errors[0], *others]))
  return results


def told_apart(
  names: Sequence[str], paths: Sequence[str | pathlib.Path]
) -> list[str]:
  """Returns the names of paths; equal names are prefixed with their folder."""
  count = collections.Counter(names)
  folder = lambda path: pathlib.Path(path).absolute().parent.name
  return [
    f"{folder(path)}_{name}" if path and count[name] > 1 else name
    for name, path in zip(names, paths)
  ]


def files(path: str) -> list[pathlib.Path]:
  """Returns the files of a path, which may be several names or patterns."""
  # Not pathlib: it raises if a list of names exceeds the limit of a file name.
  names = [path] if os.path.exists(path) else path.split(",")
  found = []
  for name in names:
    matches = [] if os.path.exists(name) else sorted(glob.glob(name))
    found += matches or [name]
  return [pathlib.Path(file) for file in found]


def read_rows(path: pathlib.Path, *, text: bool = False) -> list[Row]:
  """Reads the rows of a file.

  Args:
    path: path of the file: Parquet, or JSON lines (one object per line).
    text: whether each line is a prompt instead of an object.

  Raises:
    InputError: The file cannot be read, has no rows, or a line is malformed.
  """
  local = path.suffix or path.exists()
  advice = "check the path" if local else _HUB.format(path)
  with as_input_error(f"{path}: cannot be read", advice, OSError):
    data = _regular(path).read_bytes()
  return parse_rows(data, str(path), text=text)


def parse_rows(data: bytes, name: str, *, text: bool = False) -> list[Row]:
  """Parses the rows of a file's bytes, see `read_rows`."""
  if data.startswith(b"PAR1"):
    records = enumerate(_read_parquet(data, name), start=1)
    rows = [Row(f"{name}:{number}", plain(x)) for number, x in records]
  elif data.startswith(_COMPRESSED):
    raise InputError(
      f"{name}: a compressed file; decompress it with gunzip, unzip or the like"
    )
  elif text:
    rows = [Row(at, {"prompt": line}) for at, line in read_lines(data, name)]
  else:
    parse = lambda line: Row(
      line[0], parse_object(line[1], line[0], object_pairs_hook=_unique)
    )
    rows = _convert(parse, read_lines(data, name))
  if not rows:
    raise InputError(f"{name}: there are no rows; write one per line")
  return rows


def _read_parquet(data: bytes, name: str) -> list[dict[str, Any]]:
  import pyarrow.parquet  # Slow to import; a dependency of TFDS.

  kinds = pyarrow.ArrowException, OSError
  with as_input_error(f"{name}: damaged", "get it again", *kinds):
    table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
  return table.to_pylist()


def plain(record: Any) -> Any:
  """Converts a record to JSON values: bytes to text, NaN and inf to None."""

  def default(value: Any):
    if isinstance(value, bytes):
      return value.decode("utf-8", errors="replace")
    return value.tolist() if hasattr(value, "tolist") else str(value)

  text = json.dumps(record, default=default)
  return json.loads(text, parse_constant=lambda constant: None)


def read_lines(data: bytes, name: str) -> Iterator[tuple[str, str]]:
  """Yields the lines of a UTF-8 file; blank lines are skipped.

  Args:
    data: content of the file; a byte order mark and CRs at line ends are
      removed.
    name: name of the file.

  Yields:
    The location of a line, for messages, and its text.

  Raises:
    InputError: A line is not UTF-8.
  """
  lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
  for number, line in enumerate(lines, start=1):
    where = f"{name}:{number}"
    with as_input_error(f"{where}: not UTF-8", "save it as UTF-8", ValueError):
      text = line.decode("utf-8").removesuffix("\r")
    if text.strip():
      yield where, text


def read_text(path: pathlib.Path, advice: str) -> str:
  """Reads a small text file; raises an InputError with `advice` on failure."""
  kinds = OSError, UnicodeDecodeError
  with as_input_error(f"{path}: cannot be read", advice, *kinds):
    return _regular(path).read_text(encoding="utf-8")


def _regular(path: pathlib.Path) -> pathlib.Path:
  """Returns `path`; raises an OSError for pipes and devices (may not end)."""
  if path.exists() and not (path.is_file() or path.is_dir()):
    raise OSError("it is a pipe or a device")
  return path


def read_object(path: pathlib.Path, advice: str) -> dict[str, Any]:
  """Reads a JSON object from a small file; InputErrors have `advice`."""
  return parse_object(read_text(path, advice), str(path), advice)


def parse_object(
  text: str, where: str, advice: str = "write one object per line", **hooks: Any
) -> dict[str, Any]:
  """Parses a JSON object.

  Args:
    text: content of a line or a file.
    where: its location, for messages.
    advice: advice in the error.
    **hooks: arguments of `json.loads`.

  Raises:
    InputError: The text is not a JSON object.
  """
  with as_input_error(f"{where}: not JSON", advice, ValueError, RecursionError):
    value = json.loads(text, parse_constant=_refuse, **hooks)
  if not isinstance(value, dict):
    raise InputError(f"{where}: not a JSON object; {advice}")
  return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Makes an object of its entries, for which JSON allows equal names."""
  value = dict(pairs)
  if len(value) < len(pairs):
    ((twice, _),) = collections.Counter(k for k, _ in pairs).most_common(1)
    raise ValueError(f"{twice!r} is given twice")
  return value


def _refuse(constant: str) -> None:
  raise ValueError(f"{constant} is not a JSON number")


def to_example(
  row: Row,
  columns: Mapping[str, str] | None = None,
  *,
  name: str = "",
  source: str = "",
  solved: bool = True,
) -> Example:
  """Converts a row to an example.

  Args:
    row: a row of the data.
    columns: key of `COLUMNS` -> name of a column; dots access nested objects.
    name: id of the example, unless the row has one; '' is source and line.
    source: data source of the example, unless the row has one.
    solved: whether to read the answer. Rows whose question is in a column
      `question` or `problem` must then have one; for others the reward decides.

  Raises:
    InputError: A column is missing or not text; the message lists the others.
  """
  columns = columns or {}
  key, asked = _find(row, columns, "question")
  _, completion = _find(row, columns, "completion", needed=False)
  two = key == "prompt" and row.fields.get("messages") is not None
  if not key or (two and "question" not in columns):
    raise InputError(
      f"{row.where}: give either 'prompt' or 'messages' or 'question';"
      f" {_has(row)}"
    )
  is_text = isinstance(asked, str)
  if not is_text:
    asked = _conversation(asked, row.where, key)
  with contextlib.suppress(InputError):  # Perhaps no messages.
    completion = _conversation(completion, row.where, "completion")
  answered = not is_text and asked[-1]["role"] == "assistant"
  if answered and key != "prompt":  # A complete conversation.
    turn = [message["role"] for message in asked].index("assistant")
    asked, completion = asked[:turn], asked[turn:]
    if not asked:
      raise InputError(
        f"{row.where}: {key!r} begins with the assistant; begin with a question"
      )
  found = _answers(_find(row, columns, "answer")[1]) if solved else []
  answer, *others = [_text(x, row, "answer") for x in found] or [""]
  if solved and not answer and key in ("question", "problem"):
    raise InputError(f"{row.where}: {_lacks(row, 'answer')}")
  text = _text(asked, row, key)  # Checks a conversation too.
  name = name or (source and f"{source}-{row.where.rpartition(':')[2]}")
  given = lambda key: _text(_find(row, columns, key)[1], row, key)
  return Example(
    id=given("id") or name,
    question=text if is_text else asked[-1]["content"],
    answer=answer,
    source=given("source") or source,
    messages=None if is_text else asked,
    completion=completion,
    columns=row.fields,
    alternatives=tuple(others),
  )


def _answers(value: Any) -> list[Any]:
  """Returns the right answers in a column, whose lists and objects may nest.

  An object with several entries, or a list of lists, is one answer.
  """
  inner = list(value.values()) if isinstance(value, dict) else value
  if isinstance(inner, list) and len(inner) == 1:
    return _answers(inner[0])
  if not isinstance(value, list) or {list, dict} & {*map(type, value)}:
    value = [value]
  return [x for x in value if x is not None]


def _conversation(value: Any, where: str, name: str) -> list[dict[str, Any]]:
  """Returns messages with texts as contents; see `is_conversation`.

  Besides a text, a content may be a list of text parts, or None with calls of
  tools.

  Raises:
    InputError: The value is something else.
  """
  what, found = repr(name), []
  for message in value if isinstance(value, list) else ():
    found.append(_message(message))
    if not is_conversation(found[-1:]):
      what, value = f"message {len(found)} of {what}", message
      break
  if is_conversation(found):
    return found
  raise InputError(
    f"{where}: {what} is {reprlib.repr(value)}; give a text, or a list of"
    " messages with the strings 'role' and 'content'"
  )


def _message(message: Any) -> Any:
  """Returns a message with its text parts, or no text, as one text."""
  with contextlib.suppress(AttributeError, TypeError):  # Of another kind.
    content = message.get("content")
    if content is None and message.get("tool_calls"):
      content = ""
    if isinstance(content, list):
      content = "".join(part.get("text") for part in content)
    return {**message, "content": content}
  return message


def is_conversation(value: Any) -> bool:
  """Whether a value is a list of messages with string roles and contents."""
  messages = value if isinstance(value, list) else []
  return bool(messages) and all(
    isinstance(message, dict) and isinstance(message.get(key), str)
    for message in messages
    for key in ("role", "content")
  )


def _find(
  row: Row, columns: Mapping[str, str], key: str, *, needed: bool = True
) -> tuple[str, Any]:
  """Returns the column of a key and its value; '' and None if missing."""
  for path in [columns[key]] if key in columns else COLUMNS[key]:
    value = row.fields
    for part in path.split("."):
      value = value.get(part) if isinstance(value, dict) else None
    if value is not None:
      return path, value
  if needed and key in columns:
    raise InputError(
      f"{row.where}: {_lacks(row, columns[key], ', which data.columns names')}"
    )
  return "", None


def _lacks(row: Row, name: str, more: str = "") -> str:
  """Describes a column that a row does not have, or has without a value."""
  if name in row.fields:
    return f"{name!r}{more} is null; give it a value, or remove the row"
  return f"no field {name!r}{more}; {_has(row)}"


def _has(row: Row) -> str:
  if not row.fields:
    return "the row is empty; remove it"
  names = ", ".join(map(repr, row.fields))
  return f"it has {names}; map them with data.columns"


def _text(value: Any, row: Row, name: str) -> str | None:
  """Converts a text or number to text, and lists and objects to JSON."""
  if value is None:
    return None
  what = f"{row.where}: {name!r}"
  if isinstance(value, bool):
    raise InputError(f"{what} is a bool; give a text or a number")
  if isinstance(value, float):  # Verifiers read 0.00001, but not 1e-05.
    value = f"{decimal.Decimal(repr(value)):f}"
  is_json = isinstance(value, (list, dict))
  text = json.dumps(value, ensure_ascii=False) if is_json else str(value)
  if not text.strip():
    raise InputError(f"{what} is {text!r}; give a text that is not blank")
  half = f"{what} contains an unpaired surrogate"
  with as_input_error(half, "repair the escape", UnicodeEncodeError):
    text.encode("utf-8")
  return text
