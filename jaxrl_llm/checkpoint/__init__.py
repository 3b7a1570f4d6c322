"""Checkpoints of training runs."""

from jaxrl_llm.checkpoint.commit import (
  DamagedError as DamagedError,
  is_step as is_step,
  read as read,
  steps as steps,
)
from jaxrl_llm.checkpoint.manager import (
  Checkpointer as Checkpointer,
  load_base as load_base,
  newest_undamaged as newest_undamaged,
)
from jaxrl_llm.checkpoint.trees import (
  load as load,
  load_tree as load_tree,
  load_whole as load_whole,
  save_tree as save_tree,
)
