"""POISE (Choi et al. 2026, arXiv 2605.07579): the policy is its own critic.

Groups of two; the baseline of a response is the prediction of a linear probe on
the policy's hidden states for the other response. The rest is GRPO with
clip-higher and the token-level loss.

    python scripts/train.py --config=configs/poise.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.data.prompts_per_step *= config.data.group_size // 2
  config.data.group_size = 2
  config.method.use = ("poise",)
  return config
