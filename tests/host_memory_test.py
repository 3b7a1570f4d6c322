"""Host memory of a batch, with one process and with several."""

import pathlib
import re

import pytest
from helpers import processes

_PROGRAM = pathlib.Path(__file__).parent / "host_memory.py"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_bytes_per_token_slot(tmp_path, count):
  """Inputs of losses are on devices, split over the processes."""
  started = processes.start(
    _PROGRAM, count=count, devices=8 // count, folder=tmp_path
  )
  codes = processes.wait(started)
  texts = [(tmp_path / f"{i}.log").read_text() for i in range(count)]
  assert codes == [0] * count, texts
  for text in texts:
    line = re.search(r"rollout (\S+), step (\S+), devices (\S+)", text)
    rollout, step, devices = map(float, line.groups())
    # A rollout has 18 bytes per token slot; the engine has its own copy.
    assert rollout < 2.1 * 18
    # The rollout, two scores, and a mini-batch of an eighth of the rows.
    assert step < 18 + 2 * 4 + 20
    assert devices == pytest.approx(19 / count, abs=0.2)
