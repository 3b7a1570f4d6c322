"""Checkpoints of training runs."""

from jaxrl_llm.checkpoint.manager import Checkpointer, load_tree, save_tree

__all__ = ["Checkpointer", "load_tree", "save_tree"]
