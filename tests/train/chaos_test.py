"""The fault campaign of scripts/dev/chaos.py, in small."""

import chaos
import pytest


@pytest.mark.slow(minutes=3)
def test_faults_leave_no_trace(tmp_path, capsys, monkeypatch):
  monkeypatch.delenv("XLA_FLAGS")  # Of tests: they run slowly, on 8 devices.
  assert chaos.main(["--faults=5", "--seed=1", f"--out={tmp_path}"]) == 0
  shown = capsys.readouterr().out
  assert "5 faults, " in shown and "arrays equal those of the run" in shown
  for kind in ("kill", "stop", "kill at start", "damage", "disk"):
    assert f"| {kind} |" in shown
