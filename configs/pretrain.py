"""Rebuilds the base model that is shipped in the package.

python scripts/pretrain.py --config=configs/pretrain.py --config.out=DIR
"""

from jaxrl_llm import config as config_lib


def get_config():
  """The settings of the shipped base."""
  return config_lib.pretrain_config()
