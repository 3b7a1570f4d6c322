"""Random-access sources of `Example`: tasks, files, TFDS datasets."""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl_llm.data import remainder, rows, tasks
from jaxrl_llm.errors import InputError, as_input_error

_EVAL_SPLITS = ("eval", "test", "validation")  # In order of preference.
MOST_READ = 10_000_000  # Larger sources are never read in full.
_MOST_HELD = 1000  # Maximum number of held-out questions.


class Source(Protocol):
  """Random-access source: a length, and an example at each index."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> tasks.Example: ...


class LazySource:
  """Examples that are created on access."""

  def __init__(
    self, make: Callable[[int], tasks.Example], indices: Sequence[int]
  ):
    """Takes `make`, which maps an index to an example, and ordered indices."""
    self._make, self._indices = make, indices

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> tasks.Example:
    return self._make(self._indices[index])


def read_tfds(
  path: str,
  *,
  split: str = "train",
  columns: Mapping[str, str] | None = None,
  data_dir: str | None = None,
  download: bool = True,
) -> LazySource:
  """Opens a TensorFlow Datasets dataset without TensorFlow.

  The dataset must have been prepared in the array_record format.

  Args:
    path: name in TFDS notation: name, name/config or name:version.
    split: TFDS split, slices allowed: 'train[:10%]'. 'eval' is the first
      existing split of eval, test and validation.
    columns: see `rows.to_example`.
    data_dir: directory of datasets; None is the default of TFDS.
    download: whether to download and prepare a missing dataset.

  Raises:
    InputError: The dataset cannot be opened or is empty.
  """
  import tensorflow_datasets as tfds  # Slow to import, and used only here.

  with as_input_error(
    f"TFDS dataset {path!r}, split {split!r}: cannot be opened",
    "check data.path, data.split, eval.split and data_dir",
    Exception,  # Builders are third-party code and may raise anything.
  ):
    records = tfds.data_source(
      path,
      split=None if split == "eval" else split,
      data_dir=data_dir,
      download=download,
      builder_kwargs={"file_format": "array_record"},
    )
    if split == "eval":
      known = records
      split = next((name for name in _EVAL_SPLITS if name in known), split)
      records = known[split]
    size = len(records)
  label = f"{path.split(':')[0]}/{split}"
  if size == 0:
    raise InputError(f"TFDS dataset {label!r} is empty; check the split")

  def example(index: int) -> tasks.Example:
    where = f"TFDS dataset {label!r}, row {index}"
    row = rows.Row(where, rows.plain(records[index]))
    return rows.to_example(row, columns, name=f"{label}-{index}", source=label)

  return LazySource(example, range(size))


# Name -> factory of the source; see `register.source`.
SOURCES: dict[str, Callable[..., Source]] = {
  "chain_sum": tasks.ChainSum,
  "remainder": remainder.Remainder,
  "sums": tasks.sums,
  "jsonl": rows.read_examples,
  "parquet": rows.read_examples,
  "tfds": read_tfds,
}
FILES = ("jsonl", "parquet")  # Sources that read files.


def reads(name: str) -> frozenset[str]:
  """Returns the arguments of a source; `**kwargs` implies split and seed.

  Raises:
    InputError: The name is unknown.
  """
  if name not in SOURCES:
    raise InputError(
      f"data.source={name!r} is unknown; choose one of {sorted(SOURCES)}"
    )
  names = set()
  for p in inspect.signature(SOURCES[name]).parameters.values():
    names |= {"split", "seed"} if p.kind is p.VAR_KEYWORD else {p.name}
  return frozenset(names)


def needs_path(name: str) -> bool:
  """Whether a source requires `data.path`."""
  path = inspect.signature(SOURCES[name]).parameters.get("path")
  return path is not None and path.default is path.empty


def make_source(
  name: str,
  settings: Mapping[str, Any] | None = None,
  *,
  path: str = "",
  split: str = "train",
  seed: int = 0,
  columns: Mapping[str, str] | None = None,
) -> Source:
  """Makes a source by name, from the arguments that it reads.

  Args:
    name: a key of `SOURCES`.
    settings: settings of this source.
    path: its files, or the name of a dataset.
    split: split, for sources that have splits.
    seed: seed of a task's problems.
    columns: see `rows.to_example`.

  Raises:
    InputError: A name or setting is unknown, or the data cannot be used.
  """
  known, settings, columns = reads(name), settings or {}, columns or {}
  if needs_path(name) and not path:
    raise InputError(
      f"source {name!r} needs data.path, or eval.path for evaluation"
    )
  for column, path_of in columns.items():
    if column not in rows.COLUMNS:
      raise InputError(
        f"data.columns has {column!r}; it maps {', '.join(rows.COLUMNS)}"
      )
    if not isinstance(path_of, str):
      raise InputError(
        f"config.data.columns[{column!r}]={path_of!r}: give a column's name"
      )
  given = {"path": path, "split": split, "seed": seed, "columns": columns}
  for key in given.keys() & settings:
    place = "run.seed" if key == "seed" else f"data.{key}"
    raise InputError(f"data.settings has {key!r}; set {place} instead")
  taken = {key: value for key, value in given.items() if key in known}
  own = ", ".join(sorted(known - given.keys())) or "none"
  with as_input_error(
    f"config.data.settings={settings}",
    f"the settings of {name!r} are {own}",
    TypeError,
    ValueError,
  ):
    source = SOURCES[name](**taken, **settings)
  sized = hasattr(source, "__len__") and hasattr(source, "__getitem__")
  first = source[0] if isinstance(source, list) and source else None
  if not sized or not isinstance(first, tasks.Example | None):
    raise InputError(
      f"data.source={name!r} returned a {type(source).__name__}"
      f"{f' of {type(first).__name__}' if sized else ''}; return a list of"
      " jaxrl_llm.data.tasks.Example"
    )
  return source


def hold_out(source: Source, share: float, label: str) -> tuple[Source, Source]:
  """Splits a source by question into training and evaluation data.

  Questions are chosen by a hash of their text, without a seed, and no question
  is in both parts.

  Args:
    source: source with at least two questions.
    share: fraction of the questions to hold out: at least 1 question, at most
      1,000.
    label: label of the source, for messages.

  Returns:
    The training and the evaluation source.

  Raises:
    InputError: There are too few questions, or too many to read.
  """
  if len(source) > MOST_READ:
    raise InputError(
      f"{label}: cannot hold out questions of over {MOST_READ:,} examples;"
      " choose eval.source, or give the source an argument `split`"
    )
  digest = lambda text: hashlib.sha256(text.encode()).digest()
  asked = [digest(source[i].question) for i in range(len(source))]
  distinct = sorted(set(asked))
  count = max(1, min(round(share * len(distinct)), _MOST_HELD))
  if count >= len(distinct):
    raise InputError(
      f"{label}: too few questions ({len(distinct)} distinct in"
      f" {len(asked)} rows) to hold one out for evaluation; set eval.path, or"
      " data.holdout=0 to evaluate on them"
    )
  held = set(distinct[:count])
  parts = [], []
  for index, text in enumerate(asked):
    parts[text in held].append(index)
  train, evaluation = (LazySource(source.__getitem__, part) for part in parts)
  return train, evaluation
