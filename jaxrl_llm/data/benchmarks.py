"""Common mathematics benchmarks, read from the Hub's cache on disk."""

import contextlib
import pathlib

from jaxrl_llm.errors import InputError

# Name -> repository on the Hugging Face Hub, part of the paths of its files.
BENCHMARKS: dict[str, tuple[str, str]] = {
  "gsm8k": ("openai/gsm8k", "main/test"),
  "math500": ("HuggingFaceH4/MATH-500", "test"),
  "aime24": ("HuggingFaceH4/aime_2024", "train"),
  "aime25": ("math-ai/aime25", "test"),
  "amc23": ("math-ai/amc23", "test"),
  "minerva": ("math-ai/minervamath", "test"),
  "olympiadbench": ("math-ai/olympiadbench", "test"),
}


def find(name: str) -> tuple[str, str]:
  """Returns `data.source` and `data.path` of a benchmark's newest snapshot.

  Raises:
    InputError: It is not in the cache.
  """
  # Heavy, and needed here only.
  from huggingface_hub import constants, errors, snapshot_download

  repository, part = BENCHMARKS[name]
  with contextlib.suppress(errors.LocalEntryNotFoundError):
    folder = pathlib.Path(
      snapshot_download(repository, repo_type="dataset", local_files_only=True)
    )
    for kind in ("parquet", "jsonl"):
      files = sorted(folder.rglob(f"*.{kind}"))
      paths = [
        str(file)
        for file in files
        if part in file.relative_to(folder).as_posix()
      ]
      if paths:
        return kind, ",".join(paths)
  raise InputError(
    f"{name}: {repository} is not in {constants.HF_HUB_CACHE}; get it with"
    f" `hf download {repository} --repo-type=dataset`, or give a JSONL file"
  )
