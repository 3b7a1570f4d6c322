"""VAPO (arXiv 2504.05118).

python scripts/train.py --config=configs/vapo.py
"""

from jaxrl_llm import config as config_lib


def get_config():
  """The embedded default."""
  return config_lib.default_config()
