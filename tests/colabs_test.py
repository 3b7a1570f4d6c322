"""Runs the notebooks."""

import pathlib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_NOTEBOOKS = sorted((_ROOT / "colabs").glob("*.ipynb"))
# Notebooks that sample or train, and the sizes that tests replace in cells.
_SMALL = {
  "asynchronous": {
    "(**changes), 4)": "(**changes), 1, 1)",
    "steps=8": "steps=3",
  },
  "loop": {
    "GROUPS, GROUP_SIZE = 8, 16, 8": "GROUPS, GROUP_SIZE = 2, 4, 4",
    '"optimizer.policy.mini_batch": 64': '"optimizer.policy.mini_batch": 8',
  },
  "methods": {"SAMPLES = 48": "SAMPLES = 4"},
  "own_data": {
    '"data.prompts_per_step": 24': '"data.prompts_per_step": 4',
    '"optimizer.policy.mini_batch": 64': '"optimizer.policy.mini_batch": 16',
    '"eval.every": 5': '"eval.every": 2',
    '"eval.problems": 100': '"eval.problems": 4',
    '"run.steps": 10': '"run.steps": 2',
  },
}


def _notebooks(*, run: bool) -> list:
  """Returns one test parameter per notebook; some take minutes to run."""
  return [
    pytest.param(
      path,
      id=path.stem,
      marks=[pytest.mark.slow] if run and path.stem in _SMALL else [],
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
    for size, small in _SMALL.get(path.stem, {}).items():
      (cell,) = [cell for cell in notebook.cells if size in cell.source]
      cell.source = cell.source.replace(size, small)
    # The kernel starts in an empty folder: it can only import this package.
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
