"""Speed and memory, ours and that of other programs in the same run.

`workloads` is what is measured and needs jax; the names below do not.
"""

from benchmarks.peers import (
  COMPARED,
  SHAPES,
  Shape,
  alternate,
  last_json_object,
  read_numbers,
  run_program,
  side_by_side,
)
from benchmarks.summary import (
  Numbers,
  describe_machine,
  show,
  speed_ratios,
  summarize,
  wait_until_idle,
)

__all__ = [
  "COMPARED",
  "Numbers",
  "SHAPES",
  "Shape",
  "alternate",
  "describe_machine",
  "last_json_object",
  "read_numbers",
  "run_program",
  "show",
  "side_by_side",
  "speed_ratios",
  "summarize",
  "wait_until_idle",
]
