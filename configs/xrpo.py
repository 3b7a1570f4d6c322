"""XRPO (Bamba et al. 2025, arXiv 2510.06672): novelty sharpens advantages.

Correct responses that are less likely than the others in their group get a
bonus. The rest is GRPO with clip-higher and the token-level loss.

    python scripts/train.py --config=configs/xrpo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.method.use = ("xrpo",)
  return config
