"""DPS (2026, arXiv 2603.10887): draws groups that are predicted to be mixed.

The rest is GRPO with clip-higher and the token-level loss; DAPO's dynamic
sampling, which it replaces, is off. method.dps.explore is the fraction of
prompts that is drawn uniformly.

    python scripts/train.py --config=configs/dps.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.method.use = ("dps",)
  return config
