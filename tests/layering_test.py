"""Checks every import of the package against docs/architecture.md.

A module imports its layer and those below. The components, rollout and learner,
do not know each other: they run concurrently. Tools are imported by no other
module; the front door imports everything for the names of the package.
"""

import ast
import functools
import itertools
import pathlib
import re
import sys

from helpers import programs

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGE = (_ROOT / "docs" / "architecture.md").read_text("utf-8")
_ROWS, _REST = _PAGE.split("| layer | modules |")[1].split("\n\n", 1)
_FRONT, *_above, _TOOLS = (
  set(re.findall(r"`(\w+)`", row)) for row in _ROWS.split("\n")[2:]
)
_LEVELS = _L0, _L1, _, _L3, _L4 = _above[::-1]
_ENDS = ("", ".py")  # A module is a folder or a file.
_MATHEMATICS = {"estimators", "losses"}
_NUMERIC = {"jax", "numpy", "chex"}
# Terms of reinforcement learning, which models must not contain.
_RL_WORDS = {
  *("advantage", "advantages", "behavior", "gae"),
  *("reward", "rewards", "rollout", "rollouts"),
}
# Libraries that only the given modules may import.
_KEPT_BY = {
  "flax": {"models"},
  "optax": {"learner", "methods"},
  "ml_collections": {"config"},
}


def _in_package(rooms):
  """Returns the paths of the modules, as files and as folders."""
  return [f"jaxrl_llm/{room}{end}" for room in sorted(rooms) for end in _ENDS]


def _files(*places):
  """Returns the existing Python files at or below the given paths."""
  found = set()
  for place in (_ROOT / name for name in places):
    found |= set(place.rglob("*.py")) if place.is_dir() else {place}
  return [path for path in sorted(found) if path.exists()]


@functools.cache
def _imports(path):
  """Returns dotted names that a file imports anywhere.

  `from a.b import c` gives a.b and a.b.c, as c may be a module.
  """
  package = path.relative_to(_ROOT).parent.parts
  names = set()
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      above = package[: len(package) - node.level + 1] if node.level else ()
      base = ".".join([*above, *filter(None, [node.module])])
      names.add(base)
      names |= {f"{base}.{alias.name}" for alias in node.names}
  return names


def _libraries(path):
  """Returns top-level packages that a file imports, without the stdlib."""
  tops = {name.split(".")[0] for name in _imports(path)}
  return tops - set(sys.stdlib_module_names) - {"jaxrl_llm"}


def _room(path):
  """Returns the module that a file belongs to: `trainer`, `masked`, ..."""
  parts = path.relative_to(_ROOT / "jaxrl_llm").with_suffix("").parts
  return "" if parts[0] == "__init__" else parts[0]


@functools.cache
def _known(root):
  """Returns the modules of the package."""
  return {_room(p) for p in (root / "jaxrl_llm").rglob("*.py")} - {""}


def _rooms(path):
  """Returns modules of the package that a file imports."""
  parts = [name.split(".") for name in _imports(path)]
  used = {p[1] for p in parts if p[0] == "jaxrl_llm" and len(p) > 1}
  return used & _known(_ROOT)


def _faults(paths, found, allowed=frozenset()):
  """Returns file -> names from `found` that are not allowed, if any."""
  faults = {str(p.relative_to(_ROOT)): found(p) - allowed for p in paths}
  return {path: names for path, names in faults.items() if names}


def test_libraries_stay_in_their_rooms():
  for library, rooms in _KEPT_BY.items():
    others = [p for p in _files("jaxrl_llm") if _room(p) not in rooms]
    assert not _faults(others, lambda p, own=library: _libraries(p) & {own})


def test_every_room_has_a_level():
  levels = (*_LEVELS, _TOOLS, _FRONT)
  assert _known(_ROOT) == set().union(*levels)
  assert sum(map(len, levels)) == len(_known(_ROOT))
  # The page says what is in each of them.
  assert [r for r in _known(_ROOT) if not re.search(f"`{r}/?`", _REST)] == []


def test_rooms_import_nothing_from_above():
  below = set()
  for level in _LEVELS:
    below |= level
    assert not _faults(_files(*_in_package(level)), _rooms, below)
  # Tools but evaluation need no trainer; the package itself imports nothing.
  tools = set(_files(*_in_package(_TOOLS)))
  tools -= set(_files("jaxrl_llm/tools/evaluation.py"))
  assert not _faults(tools, _rooms, (below - {"trainer"}) | _TOOLS)
  assert not _faults(_files("jaxrl_llm/__init__.py"), _rooms)


def test_nothing_imports_trainer_but_itself_and_the_front():
  own = {"trainer", *_TOOLS, *_FRONT}
  others = [p for p in _files("jaxrl_llm") if _room(p) not in own]
  # Scripts that read a run or sample do not need the trainer, either.
  others += _files("scripts/generate.py", "scripts/convert.py")
  assert not _faults(others, lambda path: _rooms(path) & {"trainer"})


def test_a_method_is_imported_by_name_alone():
  others = [p for p in _files("jaxrl_llm") if _room(p) != "methods"]
  assert not _faults(others, lambda p: _rooms(p) & {"methods"})
  # Methods change algorithms and start no run.
  allowed = _L0 | _L1 | {"data", "learner", "rewards", "config", "methods"}
  assert not _faults(_files("jaxrl_llm/methods"), _rooms, allowed)


def test_rollout_and_learner_do_not_know_each_other():
  for own, other in itertools.permutations(_L3):
    files = _files(*_in_package({own}))
    assert not _faults(files, lambda p, other=other: _rooms(p) & {other})


def test_the_lowest_rooms_need_only_jax_and_each_other():
  for room in _L0 | _MATHEMATICS:
    files = _files(*_in_package({room}))
    assert not _faults(files, _libraries, _NUMERIC)
    assert not _faults(files, _rooms, _L0 | (_MATHEMATICS & {room}))


def test_models_know_no_words_of_reinforcement_learning():
  files = _files(*_in_package({"models"}))
  words = lambda p: set(re.findall(r"[a-z]+", p.read_text("utf-8").lower()))
  assert not _faults(files, _rooms, _L0 | {"models", "sharding"})
  assert not _faults(files, lambda path: words(path) & _RL_WORDS)


def test_presets_and_keys_need_no_library():
  # Configs are read before anything is loaded.
  names = "presets", "schema", "keys", "training_keys", "settings"
  files = _files(*(f"jaxrl_llm/config/{name}.py" for name in names))
  assert not _faults(files, _libraries)
  assert not _faults(files, _rooms, {"config"})


def test_what_starts_quickly_leaves_jax_alone():
  # Wrong flags are reported without delay; workers import nothing else.
  code = "import sys, jaxrl_llm.config, jaxrl_llm.rewards.pool"
  programs.finish("-c", f"{code}; sys.exit('jax' in sys.modules)")


def test_config_files_import_only_the_defaults():
  # A config file is loaded by its path, so it cannot import its siblings.
  assert not _faults(_files("configs"), _rooms, {"config"})
  assert not _faults(_files("configs"), _libraries, {"ml_collections"})


def test_scripts_leave_models_and_optimizers_to_the_library():
  # The shipped bases are trained with a separate schedule.
  allowed = {"pretraining": {"optax"}}
  found = lambda path: _libraries(path) & {"flax", "optax"}
  assert not _faults(
    _files("scripts"), lambda path: found(path) - allowed.get(path.stem, set())
  )
