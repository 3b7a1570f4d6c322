"""Hints for unknown settings: what was probably meant, or its name here."""

import difflib
import pathlib

from jaxrl_llm.config import moved
from jaxrl_llm.config.schema import KEYS

_ALL = "see --help_config or docs/config.md"


def folder(name: str) -> pathlib.Path:
  """Returns a folder in an installed package, or next to it in a clone."""
  package = pathlib.Path(__file__).parents[1]
  places = package / name, package.parent / name
  return next(place for place in places if place.is_dir())


def hint(key: str) -> str:
  """Returns the key that an unknown one probably means, or where to look.

  Args:
    key: a dotted key, or its last part.
  """
  if text := moved.of_key(key):
    return text
  parent, _, name = key.rpartition(".")
  if parent.endswith("settings"):
    return f"give all settings, --config.{parent}=\"{{'NAME': VALUE}}\""
  peers, whole = _peers(), key.removeprefix("actor_rollout_ref.")
  same = [k for k in KEYS if k.endswith(f".{name}")]
  # A last name that we use too, such as `name`, does not identify their key.
  theirs = [k for k in peers if k.endswith(f".{name}") and not same]
  for known in (whole, name, *theirs):
    if known in peers:
      return f"{known} {peers[known]}"
  if not 0 < len(same) < 4:
    parts = {known: known.rpartition(".")[::2] for known in KEYS}
    groups = [group for group, _ in parts.values()]
    near = difflib.get_close_matches(parent, groups, 1) if parent else groups
    names = {last: k for k, (group, last) in parts.items() if group in near}
    same = [names[x] for x in difflib.get_close_matches(name, names, 1)]
  return f"did you mean {' or '.join(same)}?" if same else _ALL


def _peers() -> dict[str, str]:
  """Returns counterparts of the keys of TRL and verl, from docs/settings.md."""
  found = {}
  page = (folder("docs") / "settings.md").read_text(encoding="utf-8")
  for line in page.splitlines():
    if not line.startswith("| "):
      continue
    trl, verl, ours, *note = line.replace("`", "").strip("| ").split(" | ")
    what = "has no counterpart here" if ours == "-" else f"is {ours} here"
    for name in f"{trl}, {verl}".split(", "):
      found.setdefault(name, ": ".join([what, *note]))
  return found
