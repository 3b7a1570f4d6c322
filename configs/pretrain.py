"""Rebuilds a base model that is shipped in the package.

    python scripts/pretrain.py --config=configs/pretrain.py[:TASK]

Tasks:
  chain_sum  (the default) running sums of up to 6 operations, step by step.
  remainder  divisions by up to 45 subtractions, with long solutions.
"""

from jaxrl_llm import config as config_lib


def get_config(task: str = "chain_sum"):
  """The settings of a shipped base."""
  return config_lib.pretrain_config(task)
