"""Definitions of the studies in studies.ini: compared variants."""

import configparser
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Variant(NamedTuple):
  """One row of a study."""

  name: str
  method: str  # configs/METHOD.py.
  changes: Mapping[str, str] = {}  # Config key -> value, as in flags.


class Study(NamedTuple):
  """Variants that are compared with the first of them."""

  title: str
  question: str
  variants: tuple[Variant, ...]
  preset: str = ""  # Scale of all variants.
  target: float = 0.8  # Accuracy to which the cost is measured.
  axes: Sequence[str] = ("tokens",)  # Panels of the figure.
  leads: Sequence[str] = ("steps", "tokens")  # Axes along which leads are.
  # Variants whose curves are plotted; empty: all.
  drawn: Sequence[str] = ()

  @property
  def baseline(self) -> str:
    """Returns the name of the variant that the others are compared with."""
    return self.variants[0].name

  def only(self, names: Sequence[str]) -> "Study":
    """Returns the study with only the named variants."""
    kept = tuple(each for each in self.variants if each.name in names)
    return self._replace(variants=kept)


def _study(section: Mapping[str, str]) -> Study:
  """Makes a study from its section of studies.ini."""
  variants = []
  for line in section["variants"].strip().splitlines():
    name, _, words = line.partition(": ")
    method, *changes = shlex.split(words)
    changes = [*shlex.split(section["settings"]), *changes]
    pairs = dict(change.split("=", 1) for change in changes)
    variants.append(Variant(name, method, pairs))
  study = Study(section["title"], section["question"], tuple(variants))
  given = {k: read(section[k]) for k, read in _OPTIONAL.items() if k in section}
  return study._replace(**given)


# Field with a default -> reads its text.
_OPTIONAL = {
  "preset": str,
  "target": float,
  "axes": str.split,
  "leads": str.split,
  "drawn": str.splitlines,
}
_PARSER = configparser.ConfigParser(
  interpolation=configparser.ExtendedInterpolation(), delimiters="="
)
_FILE = pathlib.Path(__file__).with_name("studies.ini")
_PARSER.read_string(_FILE.read_text("utf-8"))
STUDIES = {name: _study(_PARSER[name]) for name in _PARSER.sections()}
