"""Bad input ends a program with code 2 and one line; nothing is written."""

import pathlib

import accelerator
import benchmark
import convert
import detect
import generate
import pin
import pytest
import report
import simulate
import study
from helpers import cases, programs, tiny_run

_ROOT = pathlib.Path(__file__).parents[1]
_ROWS = cases.load("programs")
_FILES = _ROWS.pop("files")
_MAIN = {"train": "train", "evaluate": "evaluate", "compile": "compile"} | {
  module.__name__: module.main
  for module in (accelerator, benchmark, convert, detect, generate, pin)
  + (report, simulate, study)
}
_OUT = {"generate": "out.jsonl", "report": "out", "simulate": "out"}
_OUT["study"] = "out"


def _written(folder):
  """Returns path -> bytes of the files, without the lock of a run."""
  found = tiny_run.snapshot(folder)
  return {k: x for k, x in found.items() if x is not None and k.name != "lock"}


@pytest.mark.filterwarnings("ignore:loadtxt")
@cases.table(
  "program, row", [(name, row) for name, rows in _ROWS.items() for row in rows]
)
def test_is_one_line(program, row, model, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").symlink_to(_ROOT / "configs")
  for name, text in _FILES.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text, "latin-1")
  before = _written(tmp_path)
  text = row[0].replace("{model}", str(model)).replace("{root}", str(_ROOT))
  first, *flags = text.split() or [""]
  flags = [first, f"--out={_OUT.get(program, '')}", *flags]
  flags = [x for x in flags if x not in ("", "--out=")]
  line = programs.refused(_MAIN[program], *flags)
  assert all(words in line for words in row[1:]), line
  assert _written(tmp_path) == before
