"""Types of settings: a default, allowed values and a meaning."""

import numbers
import pkgutil
from collections.abc import Iterator
from typing import Any, NamedTuple


class Range(NamedTuple):
  """Finite numbers in the closed interval [low, high]."""

  low: float
  high: float = float("inf")
  open: bool = False  # Excludes low.

  def __contains__(self, value: Any) -> bool:
    if not isinstance(value, numbers.Real):
      return False
    # NaN fails every comparison.
    above = value > self.low or (value == self.low and not self.open)
    return above and value <= self.high and value < float("inf")

  def __str__(self) -> str:
    low, high = (int(x) if x % 1 == 0 else x for x in self[:2])
    if high == float("inf"):
      return f"{'above' if self.open else 'at least'} {low}"
    return f"in {'(' if self.open else '['}{low}, {high}]"


class Choice(tuple):
  """A tuple of the allowed values."""

  def __str__(self) -> str:
    names = ", ".join(map(repr, self))
    return f"one of {names}" if self else "a name that a plugin registers"


class Names:
  """Names in a table of functions, read on demand."""

  def __init__(self, table: str, *more: str):
    """Stores 'module:NAME' of a table in jaxrl_llm, and more allowed names."""
    self.table, self._more = table, more

  def __iter__(self) -> Iterator[str]:
    # Imports on demand: reading a config file must not import JAX.
    return iter((*self._more, *pkgutil.resolve_name(f"jaxrl_llm.{self.table}")))

  def __contains__(self, value: Any) -> bool:
    return value in tuple(self)

  def __str__(self) -> str:
    return str(Choice(self))


# Settings that cannot change on resume, because the checkpoint depends on them.
# Can never change: these determine random numbers, prompts, tokens, the
# precision of stored log-probs or the method.
FIXED = "fixed"
# Cannot change from or to 0 or '', which would switch a part of the method on
# or off. Other changes are allowed.
SWITCH = "switch"
# Cannot change while the checkpoint has unfinished responses, which need their
# slots.
IN_FLIGHT = "in flight"
# Cannot change if the source has no splits: other rows would be held out.
HELD_OUT = "held out"

# Settings that hold paths, which a run stores as absolute ones: resuming must
# not depend on the current directory. See `config.with_absolute_paths`.
PATH = "path"  # Texts that name nothing that exists are names, such as gsm8k.
NEW_PATH = "new path"  # Files that may appear later.


Path = str  # Annotations of arguments of methods that hold such paths.
NewPath = str


class Key(NamedTuple):
  """A setting of the table."""

  default: Any  # None: disabled; a number enables it.
  allowed: Range | Names | Choice | None  # None: any value of its type.
  meaning: str
  resume: str = ""  # Restriction on resume, see above; '' is none.
  path: str = ""  # Kind of path, see above; '' is none.


def setting(*fields: Any, **more: Any) -> Any:
  """Returns a `Key`, as the value of an annotated field of a group."""
  return Key(*fields, **more)


KEYS: dict[str, Key] = {}  # By dotted path.


class Group:
  """Settings under one path; a subclass registers its keys in `KEYS`."""

  def __init_subclass__(cls, path: str):
    for kind in reversed(cls.__mro__):
      for name, key in vars(kind).items():
        if isinstance(key, Key):
          KEYS[f"{path}.{name}"] = getattr(cls, name)


# Allowed values of many settings.
COUNT, SOME, NUMBER = Range(0), Range(1), Range(0.0)
SHARE, BELOW_1 = Range(0.0, 1.0), Range(0.0, 0.999999)
DTYPES = Choice(("float32", "bfloat16"))
DTYPE_OR_NONE = Choice(("", *DTYPES))
