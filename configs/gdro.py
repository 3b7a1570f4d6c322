"""GDRO of rollouts (Panaganti et al. 2026, arXiv 2601.19280).

The responses of a step are distributed over its prompts by how much their
rewards vary; their total number is fixed. The rest is GRPO with clip-higher and
the token-level loss.

    python scripts/train.py --config=configs/gdro.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.method.use = ("gdro",)
  return config
