"""DOTS (Sun et al. 2025, arXiv 2506.05316): prompts solved half of the time.

The rest is GRPO with clip-higher and the token-level loss. method.dots has
`target` (0.5), `tau` (0.1) and `explore` (0.1), the fraction of prompts that is
drawn uniformly.

    python scripts/train.py --config=configs/dots.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.method.use = ("dots",)
  return config
