"""Runs the notebooks."""

import pathlib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_NOTEBOOKS = sorted((_ROOT / "colabs").glob("*.ipynb"))
_SLOW = (
  "asynchronous",
  "loop",
  "methods",
  "own_data",
)  # They sample and train.


def _notebooks(*, run: bool) -> list:
  """One parameter a notebook; running some of them takes minutes."""
  return [
    pytest.param(
      path,
      id=path.stem,
      marks=[pytest.mark.slow(minutes=1)] if run and path.stem in _SLOW else [],
    )
    for path in _NOTEBOOKS
  ]


class TestNotebooks:
  @pytest.mark.parametrize("path", _notebooks(run=True))
  def test_runs_from_top_to_bottom(self, path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    notebook = nbformat.read(path, as_version=4)
    # The kernel starts in an empty folder: only an import can reach us.
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    client = nbclient.NotebookClient(
      notebook,
      timeout=300,
      kernel_name="python3",
      resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()

  @pytest.mark.parametrize("path", _notebooks(run=False))
  def test_is_kept_executed_with_its_outputs(self, path):
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert outputs
