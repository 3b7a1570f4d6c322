"""Datasets by name: files, sources, and benchmarks in the Hub's cache."""

import contextlib
import os
import pathlib
from typing import NamedTuple

from jaxrl_llm.data import rows, sources
from jaxrl_llm.errors import InputError

# Name -> repository on the Hugging Face Hub, and substrings of the paths of its
# evaluation and training files; '' if it has none.
BENCHMARKS: dict[str, tuple[str, str, str]] = {
  "gsm8k": ("openai/gsm8k", "main/test", "main/train"),
  "math500": ("HuggingFaceH4/MATH-500", "test", ""),
  "aime24": ("HuggingFaceH4/aime_2024", "train", ""),
  "aime25": ("math-ai/aime25", "test", ""),
  "amc23": ("math-ai/amc23", "test", ""),
  "minerva": ("math-ai/minervamath", "test", ""),
  "olympiadbench": ("math-ai/olympiadbench", "test", ""),
}
_SUFFIXES = (".jsonl", ".json", ".parquet")


class Dataset(NamedTuple):
  """An evaluation set."""

  name: str  # Used in the names of its metrics.
  source: str  # Key of `sources.SOURCES`.
  path: str = ""
  known: bool = False  # A benchmark, whose columns have the default names.


def find_sets(names: str, source: str = "jsonl") -> list[Dataset]:
  """Returns the evaluation sets in a list of names.

  Args:
    names: comma-separated names: files or patterns, benchmarks, 'tfds:NAME',
      or sources that need no path.
    source: source that reads the files. If it does not read files, every name
      is its path.

  Raises:
    InputError: A set is unknown or not in the cache, or two names are equal.
  """
  alone = os.path.isfile(names)  # The name of a file may have commas.
  found = [_find(x, source) for x in ([names] if alone else names.split(","))]
  paths = ["" if one.known else one.path for one in found]
  taken = rows.told_apart([one.name for one in found], paths)
  for name in taken:
    if taken.count(name) > 1:
      raise InputError(f"{names}: two sets are named {name!r}; rename a file")
  return [one._replace(name=name) for one, name in zip(found, taken)]


def _find(name: str, source: str) -> Dataset:
  kind, _, rest = name.partition(":")
  if source not in sources.FILES:
    return Dataset(label(name, source), source, name)
  if _is_known(name):
    return Dataset(name, source, _cached_files(name, 1), known=True)
  if kind == "tfds" and rest:
    return Dataset(label(rest, kind), kind, rest)
  without = [x for x in sources.SOURCES if not sources.needs_path(x)]
  if name in without:
    return Dataset(name, name)
  if name.endswith(_SUFFIXES) or "/" in name or pathlib.Path(name).is_file():
    return Dataset(label(name, source), source, name)
  raise InputError(
    f"{name!r} is not an evaluation set; give a .jsonl or .parquet file,"
    f" tfds:NAME or one of {', '.join([*BENCHMARKS, *without])}"
  )


def label(path: str, source: str) -> str:
  """Returns a name for the data at a path, which may be several files."""
  stems = [pathlib.Path(file).stem for file in path.split(",")]
  return "+".join(stems).partition(":")[0].replace("*", "") or source


def training_files(path: str, source: str) -> str:
  """Returns `data.path`, with benchmarks replaced by their training files.

  Raises:
    InputError: A benchmark has no training split or is not in the cache.
  """
  if source not in sources.FILES:
    return path
  find = lambda name: _cached_files(name, 2) if _is_known(name) else name
  return ",".join(map(find, path.split(",")))


def _is_known(name: str) -> bool:
  return name in BENCHMARKS and not pathlib.Path(name).is_file()


def _cached_files(name: str, split: int) -> str:
  """Returns the files of a benchmark's newest snapshot in the cache.

  Args:
    name: a key of `BENCHMARKS`.
    split: 1 for evaluation, 2 for training.

  Raises:
    InputError: The benchmark is not in the cache, or has no such split.
  """
  # Slow to import, and used only here.
  from huggingface_hub import constants, errors, snapshot_download

  repository, part = BENCHMARKS[name][0], BENCHMARKS[name][split]
  if not part:
    raise InputError(
      f"{name} is for evaluation only; set data.path to training files"
    )
  with contextlib.suppress(errors.LocalEntryNotFoundError):
    folder = pathlib.Path(
      snapshot_download(repository, repo_type="dataset", local_files_only=True)
    )
    for kind in ("parquet", "jsonl"):
      files = sorted(folder.rglob(f"*.{kind}"))
      paths = [str(x) for x in files if part in str(x.relative_to(folder))]
      if paths:
        return ",".join(paths)
  raise InputError(
    f"{name}: {repository} is not in {constants.HF_HUB_CACHE}; get it with"
    f" `hf download {repository} --repo-type=dataset`, or give a JSONL file"
  )
