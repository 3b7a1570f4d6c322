"""Tests of scripts/dev/pin.py."""

import pin
import pytest
from helpers import registries


@pytest.mark.slow(minutes=1)
def test_lines_repeat_and_depend_on_the_seed(tmp_path):
  folders = (tmp_path / str(i) for i in range(3))
  with registries.registered():
    once, again, other = (
      dict(line.rsplit(" ", 1) for line in pin.lines("grpo", folder, seed))
      for folder, seed in zip(folders, (0, 0, 1))
    )
  assert once == again and once.keys() == other.keys()
  assert sum("learner.policy.trained/" in name for name in once) > 10
  for name in ("learner.policy.trained/final_norm/scale", "metrics of step 2"):
    assert once[f"grpo {name}"] != other[f"grpo {name}"]
