"""Checkpoints of training runs."""

from jaxrl_llm.checkpoint.commit import DamagedError, is_step, steps
from jaxrl_llm.checkpoint.manager import (
  Checkpointer,
  load_base,
  newest_undamaged,
)
from jaxrl_llm.checkpoint.trees import load, load_tree, load_whole, save_tree

__all__ = [
  "Checkpointer",
  "DamagedError",
  "is_step",
  "load",
  "load_base",
  "load_tree",
  "load_whole",
  "newest_undamaged",
  "save_tree",
  "steps",
]
